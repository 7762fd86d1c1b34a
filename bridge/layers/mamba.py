"""Mamba-2 layers of Nemotron-H and others: a `self_attention` for layer specs.

A group is a key B and a query C, with the heads that have them: values x, time steps and gates. A unit is a group or a
piece of one (`Mamba.pieces`): some of its heads, and a part of the channels of its key and query. On a GPU the kernel
of `mamba_ssm` replaces the plain PyTorch of state_space.py where it is installed, and else that of `fla`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..mapping.architecture import Mamba
from .delta_rule import CHUNK, DeltaLayout, causal_conv
from .fla_kernels import FlaKernels, from_row, to_row
from .grouped_mixer import GroupedMixer, Groups, MixerWeight, make_parameter
from .state_space import state_space


@cache
def _scan_kernel() -> Callable:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # pyright: ignore[reportMissingImports]

    return mamba_chunk_scan_combined


class Mamba2(GroupedMixer):
    """Mamba-2 layer, with the arguments of `GroupedMixer`."""

    token_inputs = 2
    has_mamba_kernel = True
    multipliers: Tensor  # if the model has them

    def _groups(self, config: TransformerConfig) -> Groups:
        mamba: Mamba = config.architecture.mamba  # type: ignore[attr-defined]
        self.mamba, self.heads, self.key_dim = mamba, mamba.heads // mamba.units, mamba.state_dim // mamba.pieces
        width = self.heads * mamba.head_dim  # per unit
        noun = "groups of this model's Mamba-2 layers" + " or pieces of them" * (mamba.pieces > 1)
        return Groups(mamba.units, noun, (width + 2 * self.key_dim, width, self.heads))

    def _add_modules(self, config: TransformerConfig) -> None:
        mamba, heads = self.mamba, self.groups * self.heads
        for units in (self.groups, self.groups // self.cp_group.size()):
            if units % mamba.pieces and mamba.pieces % units:
                raise ValueError(
                    f"--tensor_model_parallel_size {self.tp_group.size()} x --context_parallel_size "
                    f"{self.cp_group.size()}: a rank would have {units} pieces of this model's Mamba-2 groups, which "
                    f"have {mamba.pieces} each. Set powers of 2"
                )
        self.conv1d = MixerWeight(
            config, self.groups * self.sections[0], 1, mamba.kernel, split=True, bias=mamba.conv_bias
        )
        self.A_log, self.D, self.dt_bias = (make_parameter(config, heads, split=True) for _ in range(3))
        if mamba.has_norm:
            self.norm = MixerWeight(config, heads * mamba.head_dim, split=True)

        if mamba.multipliers:
            gate, value, key, query, dt = mamba.multipliers
            widths = self.sections[1], self.key_dim, self.key_dim, *self.sections[1:]
            factors = torch.tensor([value, key, query, gate, dt], dtype=config.params_dtype)
            vector = factors.repeat_interleave(torch.tensor(widths)).to(self.A_log.device)
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
        bias = None if bias is None else self._local(bias, units).flatten()
        a_log, skip, dt_bias = (self._local(x, units).float() for x in (self.A_log, self.D, self.dt_bias))
        dt = F.softplus(dt.float() + dt_bias).clamp(*self.mamba.dt_limits)
        arguments: tuple[Any, ...] = (
            convolved.flatten(0, 1).flatten(1),
            dt.reshape(sequence * rows, groups, -1),
            self._local(weight, units).flatten(0, 1),
            bias,
            -a_log.exp().view(groups, -1),
            skip.view(groups, -1),
        )
        output = self._run(*arguments, layout)
        return output.view(sequence, rows, units, self.heads, self.mamba.head_dim)

    def _run(self, x: Tensor, *inputs: Any) -> Tensor:
        if self._kernels(x) == "mamba_ssm":
            return self._run_mamba_ssm(_scan_kernel(), x, *inputs)
        return super()._run(x, *inputs)

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, units * channels] -> value [tokens, groups, heads, head dim], key and query [..., state dim]

        The groups are those of which this rank has heads.
        """
        mamba, tokens = self.mamba, len(convolved)
        mixed = convolved.unflatten(-1, (-1, self.sections[0]))
        value, *key_and_query = mixed.split((self.sections[1], self.key_dim, self.key_dim), dim=-1)
        groups = max(value.shape[1] // mamba.pieces, 1)
        if value.shape[1] < mamba.pieces:
            key_and_query = self._gather_group(torch.cat(key_and_query, dim=-1)).chunk(2, dim=-1)
        key, query = (part.reshape(tokens, groups, mamba.state_dim) for part in key_and_query)
        return value.reshape(tokens, groups, -1, mamba.head_dim), key, query

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
        """x [tokens, units * channels], dt [tokens, groups, heads]; rates a and skip [groups, heads]
        -> [tokens, groups, heads, head dim]"""
        value, key, query = self._split(causal_conv(x, weight, layout, bias))
        return state_space(value, key, query, dt, dt * rates, layout) + (skip.unsqueeze(-1) * value).to(value.dtype)

    def _run_fla(
        self,
        kernels: FlaKernels,
        x: Tensor,
        dt: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rates: Tensor,
        skip: Tensor,
        layout: DeltaLayout,
    ) -> Tensor:
        value, key, query = self._split(kernels.convolve(x, weight, layout, bias).squeeze(0))  # in the row's order
        dt = to_row(dt, layout).squeeze(0)
        # The kernel wants keys and queries of each head: they are copied again in the backward pass.
        output = self._recompute(_attend, kernels.decayed_attention, value, key, query, dt, rates, layout.cu_seqlens)
        return from_row((output + (skip.unsqueeze(-1) * value).to(value.dtype)).unsqueeze(0), layout)

    def _run_mamba_ssm(
        self,
        scan: Callable,
        x: Tensor,
        dt: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rates: Tensor,
        skip: Tensor,
        layout: DeltaLayout,
    ) -> Tensor:
        """Compute `_run_torch` with mamba_ssm's kernel, on one row of documents."""
        value, key, query = self._split(causal_conv(x, weight, layout, bias))
        lengths = layout.cu_seqlens.diff()
        documents = torch.repeat_interleave(
            torch.arange(len(lengths), dtype=torch.int32, device=x.device), lengths, output_size=len(x)
        )
        output = scan(
            to_row(value.flatten(1, 2), layout),
            to_row(dt.flatten(1), layout),
            rates.flatten(),
            to_row(key, layout),
            to_row(query, layout),
            chunk_size=4 * CHUNK,
            D=skip.flatten(),
            seq_idx=documents.unsqueeze(0),
        )
        return from_row(output, layout).view_as(value)

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


def _attend(
    attention: Callable, value: Tensor, key: Tensor, query: Tensor, dt: Tensor, rates: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return `state_space` of documents in one row, as linear attention with a decay per token and head."""
    heads = value.shape[2]
    key, query = (x.repeat_interleave(heads, dim=1).unsqueeze(0) for x in (key, query))
    scaled = (value.float() * dt.unsqueeze(-1)).to(value.dtype)
    decay = (dt * rates).flatten(1).unsqueeze(0)
    output, _ = attention(query, key, scaled.flatten(1, 2).unsqueeze(0), g=decay, scale=1.0, cu_seqlens=cu_seqlens)
    return output.view_as(value)
