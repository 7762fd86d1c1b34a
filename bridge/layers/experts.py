"""Experts with stacked weights per rank, computed by grouped matrix products."""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..kernels import usable
from ..kernels.weight_gradient import has_main_grad, mark_grad_added


class _StackedLinear(torch.nn.Module):
    """Linear layers of all local experts: `weight` [experts, out, in] and, if configured, `bias` [experts, out].

    Expert tensor parallelism splits the outputs with the bias (`split_dim` 1) or the inputs (`split_dim` 2). With split
    inputs every rank has the full bias and a partial sum; the first rank adds the bias.
    """

    def __init__(
        self,
        config: TransformerConfig,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        split_dim: int,
        allreduce: bool,
        ranks,
    ):
        super().__init__()
        settings = {
            "dtype": config.params_dtype,
            "device": "cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        }
        self.weight = torch.nn.Parameter(torch.empty(experts, outputs, inputs, **settings))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=split_dim, stride=1)
        self.bias = None
        if config.architecture.expert_bias:  # type: ignore[attr-defined]
            self.bias = torch.nn.Parameter(torch.empty(experts, outputs, **settings))
            if split_dim == 1:
                set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=1, stride=1)
        self.adds_bias = split_dim == 1 or ranks.rank() == 0
        self.accumulates = config.accumulate_in_experts  # type: ignore[attr-defined]
        for parameter in self.parameters():
            parameter.allreduce = allreduce  # type: ignore[attr-defined]  # False: reduced over expert data parallelism

    def forward(self, x: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
        """x [rows, in], sorted by expert; ends int32 [experts], end of each expert's rows -> [rows, out].

        The bias is not added: see `added_bias`.
        """
        return self._forward_impl(x, self.weight, ends, counts)

    def _forward_impl(self, x: Tensor, weight: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
        if counts is None and self.accumulates:
            return cast(Tensor, _AccumulatingProduct.apply(x, weight, ends))
        return grouped_product(x, weight, ends, counts)

    def added_bias(self) -> Tensor | None:
        """Return the bias that this rank adds, [experts, out]; None without biases."""
        if self.bias is None or self.adds_bias:
            return self.bias
        # Ranks that do not add the bias still need its gradient, since all ranks hold the same parameter.
        return self.bias - self.bias.detach()


def repeat_bias(bias: Tensor, x: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    """Return the bias of each row of x [rows, out], of experts' biases [experts, out] -> [rows, out]."""
    if counts is None:
        # The backward pass of a product with ones sums each expert's rows in fp32 and in a fixed order. Eight ones,
        # since grouped products need rows of 16 bytes.
        ones = x.new_ones(len(x), 8)
        return F.grouped_mm(ones, F.pad(bias.unsqueeze(1), (0, 0, 0, 7)), offs=ends)
    return torch.cat([row.expand(count, -1) for count, row in zip(counts, bias, strict=True)])


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
    """Multiply rows x [rows, in], sorted by expert, by their experts' matrices [experts, out, in] -> [rows, out].

    counts: number of rows per expert, on the host; None: one grouped product with `ends` on the device.
    """
    if counts is None:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(x.split(counts), weight, strict=True)])


class _AccumulatingProduct(torch.autograd.Function):
    """Grouped product that adds the weight gradient to `main_grad` if the weight has one.

    x [rows, in], weight [experts, out, in], ends [experts] -> [rows, out]
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = F.grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        if not has_main_grad(weight):
            return grad_x, F.grouped_mm(grad.t(), x, offs=ends), None
        from ..kernels.grouped_gradient import add_products

        add_products(weight.main_grad, grad, x, ends)
        return grad_x, mark_grad_added(weight), None


def _fused_form(config: TransformerConfig) -> dict[str, Any] | None:
    """Return the arguments of the fused SwiGLU (kernels/swiglu.py) for a gated activation that is one; else None."""
    slopes = {F.silu: 1.0, quick_gelu: 1.702}
    if not (config.fuse_expert_activation and config.gated_linear_unit):  # type: ignore[attr-defined]
        return None
    if config.activation_func not in slopes:
        return None
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    return {"slope": slopes[config.activation_func], "limit": limit, "offset": offset}


class GroupedExperts(MegatronModule):
    """Experts of one rank. The dispatcher has already sent the rows to their experts' rank and sorted them."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection=None, name=None):
        super().__init__(config=config)
        assert pg_collection is not None
        assert config.moe_ffn_hidden_size is not None
        ranks = pg_collection.expt_tp
        width = config.moe_ffn_hidden_size // ranks.size()
        # The same condition as in ColumnParallelLinear: these weights are not replicated like the dense ones.
        allreduce = not (pg_collection.ep.size() > 1 or ranks.size() != pg_collection.tp.size())
        build = partial(_StackedLinear, config, num_local_experts, allreduce=allreduce, ranks=ranks)
        gates = 2 if config.gated_linear_unit else 1
        size = config.architecture.expert_latent or config.hidden_size  # type: ignore[attr-defined]
        self.linear_fc1 = build(size, gates * width, split_dim=1)
        self.linear_fc2 = build(width, size, split_dim=2)
        self.recompute_activation = config.recompute_granularity == "selective" and "moe_act" in (
            config.recompute_modules or []
        )
        self.fused_form = _fused_form(config)

    def _activate(
        self, x: Tensor, bias: Tensor | None, probs: Tensor | None, ends: Tensor, counts: list[int] | None
    ) -> Tensor:
        """x [rows, width (gated: 2 * width, gates first)] -> [rows, width], multiplied by `probs` [rows, 1].

        bias [experts, width of x]; ends, counts: as of `_StackedLinear.forward`
        """
        if self.fused_form is not None and usable(x):
            from ..kernels.swiglu import swiglu

            return swiglu(x, probs, bias=None if bias is None else (bias, ends), **self.fused_form)
        if bias is not None:
            x = x + repeat_bias(bias, x, ends, counts)
        limit = self.config.activation_func_clamp_value
        if self.config.gated_linear_unit:
            gate, up = x.chunk(2, dim=-1)
            if limit is not None:  # GPT-OSS (https://arxiv.org/abs/2508.10925)
                gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
            if self.config.glu_linear_offset:
                up = up + self.config.glu_linear_offset
            x = self.config.activation_func(gate) * up
        else:
            x = self.config.activation_func(x)
        return x if probs is None else (x * probs).to(x.dtype)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """rows [rows, input size], sorted by expert; tokens_per_expert [experts]; probs [rows] -> shape of rows."""
        # Grouped products need a GPU, bf16, at least one row, and matrix rows of a multiple of 16 bytes. Otherwise a
        # loop over the experts.
        is_grouped = self.config.moe_grouped_gemm and rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows) > 0
        is_grouped = is_grouped and not any(
            size % 8 for size in self.linear_fc1.weight.shape[1:] + self.linear_fc2.weight.shape[1:]
        )
        counts = None if is_grouped else tokens_per_expert.tolist()
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        weights = probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            rows, weights = (rows * weights).to(rows.dtype), None
        activate = partial(self._activate, ends=ends, counts=counts)
        activations, bias = self.linear_fc1(rows, ends, counts), self.linear_fc1.added_bias()
        if self.recompute_activation:
            checkpoint = tensor_parallel.CheckpointWithoutOutput()
            activations = checkpoint.checkpoint(activate, activations, bias, weights)
            output = self.linear_fc2(activations, ends, counts)
            checkpoint.discard_output_and_register_recompute(output)
        else:
            output = self.linear_fc2(activate(activations, bias, weights), ends, counts)
        return self._add_bias(output, weights, ends, counts), None

    def _add_bias(self, output: Tensor, weights: Tensor | None, ends: Tensor, counts: list[int] | None) -> Tensor:
        """Add the biases of the experts' outputs [rows, size], times the rows' weights [rows, 1]."""
        bias = self.linear_fc2.added_bias()
        if bias is None:
            return output
        if usable(output):
            from ..kernels.expert_bias import add_expert_bias

            return add_expert_bias(output, bias, ends, None if weights is None else weights.reshape(-1))
        rows = repeat_bias(bias, output, ends, counts)
        return output + (rows if weights is None else rows * weights).to(output.dtype)

    def backward_dw(self) -> None:
        """Do nothing: the backward pass has already computed the weight gradients."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> ShardedStateDict:
        raise RuntimeError("distributed checkpoints of grouped experts are not supported in this version")


class SharedExperts(SharedExpertMLP):
    """megatron-core's shared experts, with support for overlapped parameter all-gathers."""

    def wait_current_stream(self) -> None:
        # With --moe_shared_expert_overlap the dispatcher calls this method first, and never the module itself. Hooks of
        # this module (for the gate) and of its matrices wait for overlapped parameter all-gathers. They run on this
        # stream, since later users of the same all-gather on it do not wait again.
        for module in self.modules():
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
        super().wait_current_stream()
