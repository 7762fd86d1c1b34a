"""megatron-core's router of experts, with additional routing rules."""

from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    router_gating_linear,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..kernels import usable
from ..mapping.architecture import Routing
from .norm import Norm
from .replay import CoreReplay, Replay, replay_choice


class Router(TopKRouter):
    """Router with the rule `config.architecture.routing`, or with megatron-core's if that is None.

    The bias on the experts' scores stays the checkpoint's: balancing by this bias is for pre-training.
    """

    def __init__(self, config: TransformerConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.frozen_expert_bias = True
        self.replay = Replay()
        self.router_replay = cast(RouterReplay, CoreReplay(self))  # megatron-core calls it
        self.is_compact = False  # `routing` returns the weights and indices of each token's experts: [tokens, topk]
        self.norm = self.expert_factors = None
        self.rule: Routing | None = config.architecture.routing  # type: ignore[attr-defined]
        if self.rule is None:
            return
        experts, device = config.num_moe_experts, self.weight.device
        assert experts is not None
        if self.rule.choice_bias:  # megatron-core: with sigmoid scores only; 2D as in ERNIE's checkpoints
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(1, experts, dtype=torch.float32, device=device))
        if self.rule.logit_bias:
            self.bias = torch.nn.Parameter(torch.empty(experts, dtype=config.params_dtype, device=device))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if self.rule.fp32:
            self.weight.data = self.weight.data.float()
        if self.rule.input_norm:
            self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        if self.rule.expert_factors:
            self.expert_factors = torch.nn.Parameter(torch.empty(experts, dtype=config.params_dtype, device=device))
            self.expert_factors.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [sequence, batch, experts] of input [sequence, batch, hidden_size]."""
        if self.norm is not None:
            input = self.norm(input)
        logits = self._compute_logits(input)
        # The weight is used without calling its module, so no hook applies the adapter.
        adapter = getattr(self, "adapter", None)
        logits = logits if adapter is None else adapter(input, logits)
        return logits if self.norm is None else logits * self.config.hidden_size**-0.5

    def _compute_logits(self, input: Tensor) -> Tensor:
        compute_dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(
            self.config.moe_router_dtype or "", input.dtype
        )
        if self.weight.dtype == torch.float32:
            # If Transformer Engine is installed, megatron-core uses it, and it computes in TF32.
            logits = F.linear(input.to(compute_dtype), self.weight.to(compute_dtype))
        elif input.is_cuda and compute_dtype == torch.float32 and input.dtype == self.weight.dtype == torch.bfloat16:
            logits = cast(Tensor, _Fp32Product.apply(input.flatten(0, -2), self.weight)).unflatten(0, input.shape[:-1])
        elif self.bias is not None:  # Transformer Engine needs a bias of the output's dtype
            logits = router_gating_linear(input, self.weight, None, compute_dtype)
        else:
            return super().gating(input)
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return each expert's weight and whether it is chosen, both [sequence * batch, experts].

        logits [sequence, batch, experts]. If `is_compact`: return the same as `choose_experts`.
        """
        if self.is_compact:
            return self._compact_routing(logits)
        if self.rule is None or self.routing_type == "sinkhorn":
            return super().routing(logits, padding_mask)
        assert padding_mask is None
        length, batch = logits.shape[:2]
        logits = self.apply_z_loss(logits.flatten(0, 1))
        replayed = self.replay.pop_experts(training=self.training)
        topk_weights, experts = choose_experts(logits.float(), self.expert_bias, self.rule, self.config, replayed)
        self.replay.record(experts)
        weights = torch.zeros_like(logits).scatter(1, experts, topk_weights.to(logits.dtype))
        if self.expert_factors is not None:
            weights = weights * self.expert_factors.to(weights.dtype)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)
        if self.config.moe_expert_capacity_factor is not None:
            weights, routing_map = apply_router_token_dropping(
                weights,
                routing_map,
                router_topk=self.topk,
                capacity_factor=self.config.moe_expert_capacity_factor,
                drop_policy=self.config.moe_token_drop_policy,
                pad_to_capacity=self.config.moe_pad_expert_input_to_capacity,
            )
        return self._attach_balancing_losses(weights, logits, length, batch), routing_map

    def _compact_routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        length, batch = logits.shape[:2]
        logits, config, rule = self.apply_z_loss(logits.flatten(0, 1)), self.config, self.rule
        is_sigmoid, has_groups = self.score_function == "sigmoid", config.moe_router_group_topk is not None
        is_mixed = rule is not None and rule.sparse_mixer is not None
        if usable(logits) and not has_groups and not is_mixed and logits.dtype != torch.float64:
            from ..kernels.routing import RoutingForm, route

            normalize = rule.normalize if rule else (self.topk > 1 if is_sigmoid else not config.moe_router_pre_softmax)
            smallest_sum = rule.smallest_sum if rule else 1e-20
            scale = config.moe_router_topk_scaling_factor or 1.0
            bias = self.expert_bias if rule or is_sigmoid else None
            form = RoutingForm(self.topk, is_sigmoid, normalize, smallest_sum, scale)
            weights, experts = route(logits, bias, form, self.replay.pop_experts(training=self.training))
            self.replay.record(experts)
        elif rule:
            replayed = self.replay.pop_experts(training=self.training)
            weights, experts = choose_experts(logits.float(), self.expert_bias, rule, config, replayed)
            self.replay.record(experts)
            weights = weights.to(logits.dtype)
        else:
            weights, experts = topk_routing_with_score_function(
                logits,
                self.topk,
                use_pre_softmax=config.moe_router_pre_softmax,
                num_groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
                scaling_factor=config.moe_router_topk_scaling_factor,
                score_function=self.score_function,
                expert_bias=self.expert_bias,
                router_replay=self.router_replay,
                dense_output=True,
            )
        if self.expert_factors is not None:
            weights = weights * self.expert_factors.to(weights.dtype)[experts]
        return self._attach_balancing_losses(weights, logits, length, batch), experts

    def _attach_balancing_losses(self, weights: Tensor, logits: Tensor, length: int, batch: int) -> Tensor:
        """Attach the gradients of the balancing losses of logits [length * batch, experts] to `weights`."""
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            routing_map, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
            weights = self._apply_aux_loss(weights, scores, routing_map)
            weights = self._apply_seq_aux_loss(weights, scores, routing_map, length, batch)
            weights = self._apply_global_aux_loss(weights, scores, routing_map)
        return weights


class _Fp32Product(torch.autograd.Function):
    """fp32 product of bf16 matrices. The backward pass splits the fp32 gradient into a sum of two bf16 tensors.

    x [tokens, hidden_size], weight [experts, hidden_size] -> [tokens, experts]. A product of bf16 numbers is exact in
    fp32, and the two tensors hold 16 of the gradient's 24 bits; TF32, which Transformer Engine uses, holds 11.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        high = grad.to(weight.dtype)
        parts = torch.cat([high, (grad - high).to(weight.dtype)], dim=1)
        grad_x = parts @ torch.cat([weight, weight]) if ctx.needs_input_grad[0] else None
        if x is None:
            return grad_x, None
        grad_weight = torch.mm(parts.t(), x, out_dtype=torch.float32)
        return grad_x, grad_weight.unflatten(0, (2, -1)).sum(0).to(weight.dtype)


def choose_experts(
    logits: Tensor, bias: Tensor | None, rule: Routing, config: TransformerConfig, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights and indices of each token's experts, both [tokens, topk], for fp32 logits [tokens, experts].

    Scores are sigmoids, or a softmax over all experts. `bias` ([1,] experts) affects the choice, not the weights.
    `replayed` [tokens, topk]: the choice to repeat (layers/replay.py).
    With groups, only experts of the best groups can be chosen (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section
    2.1.2; DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.2.2).
    """
    if rule.sparse_mixer is not None:
        return mix_sparsely(logits, rule.sparse_mixer, replayed)
    scores = logits.sigmoid() if config.moe_router_score_function == "sigmoid" else logits.softmax(dim=-1)
    choice_scores = scores.detach() if bias is None else scores.detach() + bias
    if config.moe_router_num_groups is not None and config.moe_router_group_topk is not None:
        grouped = choice_scores.unflatten(1, (config.moe_router_num_groups, -1))
        group_scores = grouped.topk(rule.group_members, dim=-1).values.sum(dim=-1)
        best_groups = group_scores.topk(config.moe_router_group_topk, dim=-1).indices
        is_allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, True)
        choice_scores = grouped.masked_fill(~is_allowed.unsqueeze(-1), -torch.inf).flatten(1)
    experts = replay_choice(choice_scores.topk(config.moe_router_topk, dim=-1).indices, replayed)
    weights = scores.gather(1, experts)
    if rule.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=rule.smallest_sum)
    return weights * (config.moe_router_topk_scaling_factor or 1.0), experts


def mix_sparsely(logits: Tensor, margin: float, replayed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return SparseMixer's weights and indices of each token's two experts, both [tokens, 2].

    The second expert is the best of the others. An expert's weight is its softmax among those whose logits are within
    the margin of it, without the first one for the second. (https://arxiv.org/abs/2409.12136; without the random
    choice that the paper has in training, as in transformers' evaluation.) replayed: as of `choose_experts`.
    """
    scores, first = logits.detach(), logits.detach().argmax(-1, keepdim=True)
    second = scores.scatter(-1, first, -torch.inf).argmax(-1, keepdim=True)
    experts = replay_choice(torch.cat((first, second), dim=-1), replayed)
    weights, is_left = [], torch.ones_like(logits, dtype=torch.bool)
    for expert in experts.split(1, dim=-1):
        largest = scores.masked_fill(~is_left, -torch.inf).amax(-1, keepdim=True)
        is_near = (largest - scores) <= 2 * margin * torch.maximum(scores.abs(), largest)
        is_near = (is_near & is_left).scatter(-1, expert, True)
        weights.append(logits.masked_fill(~is_near, -torch.inf).softmax(-1).gather(-1, expert))
        is_left = is_left.scatter(-1, expert, False)
    return torch.cat(weights, dim=-1), experts
