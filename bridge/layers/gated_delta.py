"""Gated delta nets of Qwen3-Next and Qwen3.5: a `self_attention` for layer specs.

A group is a key head with its query head, value heads, gates and decays.
"""

import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor

from .delta_rule import DeltaLayout, causal_conv, delta_rule
from .fla_kernels import FlaKernels, boundaries, from_row, to_row
from .grouped_mixer import GroupedMixer, Groups, MixerWeight, make_parameter


class GatedDeltaNet(GroupedMixer):
    """Gated delta net, with the arguments of `GroupedMixer`."""

    token_inputs = 3

    def _groups(self, config: TransformerConfig) -> Groups:
        self.key_dim, self.value_dim = not_none(config.linear_key_head_dim), not_none(config.linear_value_head_dim)
        key_heads = not_none(config.linear_num_key_heads)
        self.heads = not_none(config.linear_num_value_heads) // key_heads  # per group
        # Channels per group: the convolution's, then the output gates, betas and decays.
        self.conv_dim = 2 * self.key_dim + self.heads * self.value_dim
        noun = "key heads (linear_num_key_heads) of this model's gated delta nets"
        return Groups(key_heads, noun, (self.conv_dim, self.heads * self.value_dim, self.heads, self.heads))

    def _add_modules(self, config: TransformerConfig) -> None:
        kernel = not_none(config.linear_conv_kernel_dim)
        self.conv1d = MixerWeight(config, self.groups * self.conv_dim, 1, kernel, split=True)
        # A_log and the norm are in fp32, as in checkpoints.
        self.A_log = make_parameter(config, self.groups * self.heads, fp32=True, split=True)
        self.dt_bias = make_parameter(config, self.groups * self.heads, split=True)
        self.norm = MixerWeight(config, self.value_dim, fp32=True)

    def _mix(self, qkv: Tensor, beta: Tensor, dt: Tensor, layout: DeltaLayout) -> Tensor:
        """qkv [sequence, rows, groups, channels], beta and dt [sequence, rows, groups, heads], of full documents
        -> [sequence, rows, groups, heads, value dim]"""
        sequence, rows, groups, _ = qkv.shape
        conv_weight, a_log, dt_bias = (self._local(x, groups) for x in (self.conv1d(), self.A_log, self.dt_bias))
        beta = beta.sigmoid()
        decay = -a_log.float().exp() * F.softplus(dt.float() + dt_bias.float())
        conv_weight = conv_weight.flatten(0, 1)
        inputs = (x.flatten(0, 1) for x in (qkv.flatten(2), decay, beta))
        return self._run(*inputs, conv_weight, layout).view(sequence, rows, groups, self.heads, self.value_dim)

    def _split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., groups * channels] -> query, key [..., groups, key dim], value [..., groups, heads, value dim]"""
        query, key, value = qkv.unflatten(-1, (-1, self.conv_dim)).split(
            (self.key_dim, self.key_dim, self.heads * self.value_dim), dim=-1
        )
        return query, key, value.unflatten(-1, (self.heads, self.value_dim))

    def _run_torch(self, qkv: Tensor, decay: Tensor, beta: Tensor, conv_weight: Tensor, layout: DeltaLayout) -> Tensor:
        return delta_rule(*self._split_qkv(causal_conv(qkv, conv_weight, layout)), decay, beta, layout)

    def _run_fla(
        self, kernels: FlaKernels, qkv: Tensor, decay: Tensor, beta: Tensor, conv_weight: Tensor, layout: DeltaLayout
    ) -> Tensor:
        query, key, value = self._split_qkv(kernels.convolve(qkv, conv_weight, layout))
        output, _ = kernels.delta_rule(
            *(x.contiguous() for x in (query, key, value.flatten(2, 3))),
            g=to_row(decay.flatten(1), layout),
            beta=to_row(beta.flatten(1), layout),
            use_qk_l2norm_in_kernel=True,
            **boundaries(layout),
        )
        return from_row(output, layout)

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        # Ranks normalize different heads by the same weight, so its gradient is summed over them.
        weight = copy_to_tensor_model_parallel_region(self.norm(), group=self.tp_group)
        normed = F.rms_norm(x.float(), (self.value_dim,), weight.float(), self.config.layernorm_epsilon)
        return (normed * F.silu(gate.float())).to(x.dtype)
