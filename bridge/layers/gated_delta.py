"""Gated delta nets of Qwen3-Next and Qwen3.5: a `self_attention` for layer specs.

A group is a key head with its query head, value heads, gates and decays. On a GPU with `fla` installed, its kernels
replace the plain PyTorch of delta_rule.py.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor

from .delta_rule import DeltaLayout, causal_conv, delta_rule
from .grouped_mixer import GroupedMixer, MixerWeight, make_parameter


class _FlaKernels(NamedTuple):
    conv: Callable
    rule: Callable


def delta_kernels(dtype: torch.dtype, *, on_gpu: bool, deterministic: bool) -> str:
    """Return the kernels of gated delta nets: "fla", "torch", or "missing": torch, since fla is not installed."""
    # fla's kernels support half precision only, and are not deterministic.
    if not on_gpu or dtype == torch.float32 or deterministic:
        return "torch"
    return "fla" if find_spec("fla") else "missing"


@cache
def _fla_kernels() -> _FlaKernels:
    """Return the kernels of flash-linear-attention."""
    from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    return _FlaKernels(causal_conv1d, chunk_gated_delta_rule)


class GatedDeltaNet(GroupedMixer):
    """Gated delta net, with the arguments of `GroupedMixer`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        in_proj,
        out_proj,
        pg_collection=None,
        name: str | None = None,
        **_,
    ):
        key_dim, value_dim = not_none(config.linear_key_head_dim), not_none(config.linear_value_head_dim)
        key_heads, value_heads = not_none(config.linear_num_key_heads), not_none(config.linear_num_value_heads)
        kernel = not_none(config.linear_conv_kernel_dim)
        heads = value_heads // key_heads  # per group
        # Channels per group: the convolution's, then the output gates, betas and decays.
        conv_dim = 2 * key_dim + heads * value_dim
        super().__init__(
            config,
            layer_number,
            in_proj,
            out_proj,
            pg_collection,
            groups=key_heads,
            noun="key heads (linear_num_key_heads) of this model's gated delta nets",
            sections=(conv_dim, heads * value_dim, heads, heads),
        )
        self.key_dim, self.value_dim, self.heads, self.conv_dim = key_dim, value_dim, heads, conv_dim
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
        if delta_kernels(qkv.dtype, on_gpu=qkv.is_cuda, deterministic=self.config.deterministic_mode) == "fla":
            output = self._run_fla(_fla_kernels(), qkv, conv_weight, decay, beta, layout)
        else:
            inputs = (x.flatten(0, 1) for x in (qkv.flatten(2), decay, beta))
            output = self._recompute(self._run_torch, *inputs, conv_weight, layout)
        return output.view(sequence, rows, groups, self.heads, self.value_dim)

    def _split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., groups * channels] -> query, key [..., groups, key dim], value [..., groups, heads, value dim]"""
        query, key, value = qkv.unflatten(-1, (-1, self.conv_dim)).split(
            (self.key_dim, self.key_dim, self.heads * self.value_dim), dim=-1
        )
        return query, key, value.unflatten(-1, (self.heads, self.value_dim))

    def _run_torch(self, qkv: Tensor, decay: Tensor, beta: Tensor, conv_weight: Tensor, layout: DeltaLayout) -> Tensor:
        return delta_rule(*self._split_qkv(causal_conv(qkv, conv_weight, layout)), decay, beta, layout)

    def _run_fla(
        self, kernels: _FlaKernels, qkv: Tensor, conv_weight: Tensor, decay: Tensor, beta: Tensor, layout: DeltaLayout
    ) -> Tensor:
        """Compute `_run_torch` with fla's kernels, on [sequence, rows, ...] instead of [tokens, ...]."""
        # fla takes one row of documents, so the rows are concatenated.
        sequence, rows = qkv.shape[:2]
        packed = [x.transpose(0, 1).flatten(0, 1).unsqueeze(0) for x in (qkv.flatten(2), decay, beta)]
        convolved, _ = kernels.conv(
            x=packed[0].contiguous(),
            weight=conv_weight.squeeze(1).to(qkv.dtype),
            bias=None,
            activation="silu",
            cu_seqlens=layout.cu_seqlens,
        )
        query, key, value = self._split_qkv(convolved)
        query, key = (x.repeat_interleave(self.heads, dim=-2) for x in (query, key))
        output, _ = kernels.rule(
            query,
            key,
            value.flatten(2, 3).contiguous(),
            g=packed[1].flatten(2).contiguous(),
            beta=packed[2].flatten(2).contiguous(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=layout.cu_seqlens,
        )
        return output.view(rows, sequence, -1).transpose(0, 1).contiguous()

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        # Ranks normalize different heads by the same weight, so its gradient is summed over them.
        weight = copy_to_tensor_model_parallel_region(self.norm(), group=self.tp_group)
        normed = F.rms_norm(x.float(), (self.value_dim,), weight.float(), self.config.layernorm_epsilon)
        return (normed * F.silu(gate.float())).to(x.dtype)
