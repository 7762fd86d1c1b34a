"""Mamba-2 layers of Nemotron-H and others: a `self_attention` for layer specs.

A group is a key B and a query C, with the heads that have them: values x, time steps and gates. A unit is a group or a
piece of one (`Mamba.pieces`): some of its heads, and a part of the channels of its key and query. On a GPU with
`mamba_ssm` installed, its kernel replaces the plain PyTorch of state_space.py.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..mapping.architecture import Mamba
from .delta_rule import CHUNK, DeltaLayout, causal_conv
from .grouped_mixer import GroupedMixer, MixerWeight, make_parameter
from .state_space import state_space


def mamba_kernels(dtype: torch.dtype, *, on_gpu: bool, deterministic: bool) -> str:
    """Return the kernels of Mamba-2 layers: "mamba_ssm", "torch", or "missing": torch, as it is not installed."""
    # The kernel's products in fp32 are in TF32, and its backward pass adds in any order.
    if not on_gpu or dtype == torch.float32 or deterministic:
        return "torch"
    return "mamba_ssm" if find_spec("mamba_ssm") else "missing"


@cache
def _scan_kernel() -> Callable:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # pyright: ignore[reportMissingImports]

    return mamba_chunk_scan_combined


class Mamba2(GroupedMixer):
    """Mamba-2 layer, with the arguments of `GroupedMixer`."""

    multipliers: Tensor  # if the model has them

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
        mamba: Mamba = config.architecture.mamba  # type: ignore[attr-defined]
        heads, key_dim = mamba.heads // mamba.units, mamba.state_dim // mamba.pieces  # per unit
        conv_dim = heads * mamba.head_dim + 2 * key_dim
        super().__init__(
            config,
            layer_number,
            in_proj,
            out_proj,
            pg_collection,
            groups=mamba.units,
            noun="groups of this model's Mamba-2 layers" + " or pieces of them" * (mamba.pieces > 1),
            sections=(conv_dim, heads * mamba.head_dim, heads),
        )
        self.mamba, self.heads = mamba, heads
        for units in (self.groups, self.groups // self.cp_group.size()):
            if units % mamba.pieces and mamba.pieces % units:
                raise ValueError(
                    f"--tensor_model_parallel_size {self.tp_group.size()} x --context_parallel_size "
                    f"{self.cp_group.size()}: a rank would have {units} pieces of this model's Mamba-2 groups, which "
                    f"have {mamba.pieces} each. Set powers of 2"
                )
        self.conv1d = MixerWeight(config, self.groups * conv_dim, 1, mamba.kernel, split=True, bias=mamba.conv_bias)
        self.A_log, self.D, self.dt_bias = (make_parameter(config, self.groups * heads, split=True) for _ in range(3))
        if mamba.has_norm:
            self.norm = MixerWeight(config, self.groups * heads * mamba.head_dim, split=True)

        if mamba.multipliers:
            gate, value, key, query, dt = mamba.multipliers
            values = [value] * heads * mamba.head_dim
            factors = [*values, *[key] * key_dim, *[query] * key_dim, *[gate] * len(values), *[dt] * heads]
            vector = torch.tensor(factors, dtype=config.params_dtype, device=self.A_log.device)
            self.register_buffer("multipliers", vector, persistent=False)

    def _project(self, hidden_states: Tensor) -> Sequence[Tensor]:
        projected = super()._project(hidden_states)
        if not self.mamba.multipliers:
            return projected
        factors = self.multipliers.split(self.sections)
        return [part * factor for part, factor in zip(projected, factors, strict=True)]

    def _mix(self, convolved: Tensor, dt: Tensor, layout: DeltaLayout) -> Tensor:
        """convolved [sequence, rows, units, channels], dt [sequence, rows, units, heads], of full documents
        -> [sequence, rows, units, heads, head dim]"""
        sequence, rows, units, _ = convolved.shape
        groups = max(units // self.mamba.pieces, 1)
        weight, bias = self.conv1d(), self.conv1d.bias
        weights = [self._local(weight, units).flatten(0, 1), None if bias is None else self._local(bias, units)]
        a_log, skip, dt_bias = (self._local(x, units).float() for x in (self.A_log, self.D, self.dt_bias))
        dt = F.softplus(dt.float() + dt_bias).clamp(*self.mamba.dt_limits)
        arguments: tuple[Any, ...] = (
            convolved.flatten(0, 1).flatten(1),
            dt.reshape(sequence * rows, groups, -1),
            *weights,
            -a_log.exp().view(groups, -1),
            skip.view(groups, -1),
        )
        kernels = mamba_kernels(convolved.dtype, on_gpu=convolved.is_cuda, deterministic=self.config.deterministic_mode)
        if kernels == "mamba_ssm":
            output = self._run_kernel(_scan_kernel(), *arguments, layout=layout, rows=rows)
        else:
            output = self._recompute(self._run_torch, *arguments, layout)
        return output.view(sequence, rows, units, self.heads, self.mamba.head_dim)

    def _convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layout: DeltaLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, units * channels] -> value [tokens, groups, heads, head dim], key and query [..., state dim]

        The groups are those of which this rank has heads.
        """
        mamba, bias = self.mamba, None if bias is None else bias.flatten()
        mixed = causal_conv(x, weight, layout, bias).unflatten(-1, (-1, self.sections[0]))
        key_dim = mamba.state_dim // mamba.pieces
        value, *key_and_query = mixed.split((self.heads * mamba.head_dim, key_dim, key_dim), dim=-1)
        groups = max(value.shape[1] // mamba.pieces, 1)
        if value.shape[1] < mamba.pieces:
            key_and_query = self._gather_group(torch.cat(key_and_query, dim=-1)).chunk(2, dim=-1)
        key, query = (part.reshape(len(x), groups, mamba.state_dim) for part in key_and_query)
        return value.reshape(len(x), groups, -1, mamba.head_dim), key, query

    def _gather_group(self, x: Tensor) -> Tensor:
        """Return all pieces of the group that this rank has some of: x [tokens, units, ...] -> [tokens, pieces, ...]"""
        units = x.shape[1]
        x = x.transpose(0, 1).contiguous()
        for ranks in (self.cp_group, self.tp_group):
            x = gather_from_sequence_parallel_region(x, group=ranks)
        first = (self.tp_group.rank() * self.cp_group.size() + self.cp_group.rank()) * units
        return x.unflatten(0, (-1, self.mamba.pieces))[first // self.mamba.pieces].transpose(0, 1)

    def _run_torch(
        self,
        x: Tensor,
        dt: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rates: Tensor,
        skip: Tensor,
        layout: DeltaLayout,
    ) -> Tensor:
        """Return [tokens, groups, heads, head dim]. x [tokens, units * channels]; rates a and skip [groups, heads]."""
        value, key, query = self._convolve(x, weight, bias, layout)
        return state_space(value, key, query, dt, dt * rates, layout) + (skip.unsqueeze(-1) * value).to(value.dtype)

    def _run_kernel(
        self,
        scan: Callable,
        x: Tensor,
        dt: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rates: Tensor,
        skip: Tensor,
        layout: DeltaLayout,
        rows: int,
    ) -> Tensor:
        """Compute `_run_torch` with mamba_ssm's kernel, on one row of documents instead of [sequence, rows]."""

        def to_row(
            part: Tensor,
        ) -> Tensor:  # [sequence * rows, groups, (heads,) ...] -> [1, tokens, groups * heads, ...]
            return part.unflatten(0, (-1, rows)).transpose(0, 1).flatten(0, 1).unsqueeze(0).contiguous()

        value, key, query = self._convolve(x, weight, bias, layout)
        lengths = layout.cu_seqlens.diff()
        documents = torch.repeat_interleave(
            torch.arange(len(lengths), dtype=torch.int32, device=x.device), lengths, output_size=len(x)
        )
        output = scan(
            to_row(value.flatten(1, 2)),
            to_row(dt.flatten(1)),
            rates.flatten(),
            to_row(key),
            to_row(query),
            chunk_size=4 * CHUNK,
            D=skip.flatten(),
            seq_idx=documents.unsqueeze(0),
        )
        return output.view(rows, -1, *value.shape[1:]).transpose(0, 1).contiguous()

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm each group's heads together."""
        gated = (x.float() * F.silu(gate.float())).flatten(-2)
        if not self.mamba.has_norm:
            return gated.to(x.dtype)
        if self.mamba.pieces == 1:
            normed = F.rms_norm(gated, gated.shape[-1:], eps=self.config.layernorm_epsilon)
        else:
            mean = self._group_mean(gated.square().mean(-1))
            normed = gated * (mean + self.config.layernorm_epsilon).rsqrt().unsqueeze(-1)
        return self.norm().view(self.groups, -1) * normed.to(x.dtype)

    def _group_mean(self, x: Tensor) -> Tensor:
        """Return for each unit the mean of its group's pieces: x [sequence, rows, units] -> the same shape."""
        units, first = x.shape[-1], 0
        if units % self.mamba.pieces:
            x = gather_from_sequence_parallel_region(x.movedim(-1, 0).contiguous(), group=self.tp_group).movedim(0, -1)
            first = self.tp_group.rank() * units
        mean = x.unflatten(-1, (-1, self.mamba.pieces)).mean(-1)
        return mean.repeat_interleave(self.mamba.pieces, dim=-1).narrow(-1, first, units)
