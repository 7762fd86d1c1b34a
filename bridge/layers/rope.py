"""Rotary position embeddings by position ids, which covers packed documents and context parallelism."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..mapping.architecture import HfConfig, Rope


@dataclass(frozen=True)
class RotaryRule:
    """Frequencies of rotary embeddings, on a device."""

    frequencies: Tensor  # [planes] fp32
    factor: float = 1.0  # factor on cos and sin
    interleaved: bool = False
    original_length: int = 0  # longer documents use `long_frequencies`, if there are any
    long_frequencies: Tensor | None = None
    axes: Tensor | None = None  # [planes] int64: index of the position that rotates each plane; None: one position


class RotaryTables(NamedTuple):
    """Cosines, sines and angles of a micro batch for one rotary rule; cos and sin in the model's dtype."""

    cos: Tensor  # [sequence, batch, 1, dim]
    sin: Tensor
    angles: Tensor | None  # [sequence, 1, 1, dim] fp32, contiguous: the first row's; None if cos and sin have a factor
    interleaved: bool
    plane_cos_sin: tuple[Tensor, Tensor]  # cos and sin per plane, [sequence, batch, dim / 2] fp32


def make_rotary_rule(rope: Rope, device: torch.device) -> RotaryRule:
    """Return the rotary rule of a rope. Raises ValueError for an unknown rope type."""
    scaling = rope.scaling or {}
    frequencies = inverse_frequencies(rope.dim, rope.base, scaling).to(device)
    long_frequencies = None
    if scaling.get("rope_type") == "longrope":
        factors = scaling | {"short_factor": scaling["long_factor"]}
        long_frequencies = inverse_frequencies(rope.dim, rope.base, factors).to(device)
    original_length = scaling.get("original_max_position_embeddings", 0)
    axes = torch.tensor(rope.axes, device=device) if rope.axes else None
    return RotaryRule(
        frequencies, scaling.get("attention_factor", 1.0), rope.interleaved, original_length, long_frequencies, axes
    )


def inverse_frequencies(dim: int, base: float, scaling: HfConfig | None) -> Tensor:
    """Return the angular frequencies of the `dim / 2` planes, fp32, as in transformers' rope functions.

    `scaling` is None or {"rope_type": ...} with all keys of a Hugging Face config. Types: linear; Llama 3
    (https://arxiv.org/abs/2407.21783: long waves are stretched by `factor`, short ones kept, those between blended);
    YaRN (https://arxiv.org/abs/2309.00071, section 3.2); LongRoPE (https://arxiv.org/abs/2402.13753: a factor for each
    plane); proportional (only the first planes turn, a share `partial_rotary_factor` of them). Raises ValueError for an
    unknown rope type.
    """
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = (scaling or {}).get("rope_type", "default")
    if not scaling or kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "proportional":
        turning = int(scaling["partial_rotary_factor"] * dim // 2)
        return torch.where(torch.arange(dim // 2) < turning, frequencies / scaling["factor"], 0.0)
    if kind == "longrope":
        return frequencies / torch.tensor(scaling["short_factor"], dtype=torch.float32)
    if kind == "yarn":
        kept = _yarn_kept(dim, base, scaling)
    elif kind == "llama3":
        low, high, original_length = (
            scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        wavelengths = 2 * math.pi / frequencies
        # 0 for long waves (fully stretched), 1 for short ones (kept).
        kept = ((original_length / wavelengths - low) / (high - low)).clamp(0, 1)
    else:
        raise ValueError(f"rope type {kind!r} is not supported")
    return kept * frequencies + (1 - kept) * frequencies / scaling["factor"]


def _yarn_kept(dim: int, base: float, scaling: HfConfig) -> Tensor:
    """Return the share of each plane's frequency that is kept: [planes].

    It is 1 for planes that rotate more than beta_fast times within the original length, 0 for those that rotate less
    than beta_slow times, and linear in between.
    """

    def plane_index(rotations: float) -> float:
        return (
            dim * math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / 2 / math.log(base)
        )

    low, high = plane_index(scaling["beta_fast"]), plane_index(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def make_rotary_tables(
    position_ids: Tensor, rule: RotaryRule, select_long: Callable[[int], Tensor | bool], dtype: torch.dtype
) -> RotaryTables:
    """Return the rotary tables of position_ids [batch, sequence] or [axes, batch, sequence].

    select_long(length): whether each token's document is longer, as one bool for all tokens or as [sequence].
    """
    frequencies = rule.frequencies
    if rule.long_frequencies is not None:
        is_long = select_long(rule.original_length)
        if isinstance(is_long, Tensor):
            frequencies = torch.where(is_long[:, None, None], rule.long_frequencies, frequencies)
        elif is_long:
            frequencies = rule.long_frequencies
    if position_ids.dim() == 2:
        positions = position_ids.t().unsqueeze(-1)
    else:
        positions = position_ids.permute(2, 1, 0)[..., rule.axes if rule.axes is not None else slice(1)]
    planes = positions.float() * frequencies  # [sequence, batch, dim / 2]
    angles = planes.repeat_interleave(2, dim=-1) if rule.interleaved else torch.cat((planes, planes), dim=-1)
    angles = angles.unsqueeze(2)
    cos, sin = angles.cos(), angles.sin()
    if rule.factor != 1.0:
        cos, sin = cos * rule.factor, sin * rule.factor
    # All padded rows have the same positions, and packed documents are in one row.
    row_angles = angles[:, :1].contiguous() if rule.factor == 1.0 else None
    plane_slice = slice(None, None, 2) if rule.interleaved else slice(planes.shape[-1])
    plane_cos_sin = cos[:, :, 0, plane_slice], sin[:, :, 0, plane_slice]
    return RotaryTables(cos.to(dtype), sin.to(dtype), row_angles, rule.interleaved, plane_cos_sin)


def slice_rotary(rotary: RotaryTables, start: int, stop: int, *, interleaved: bool) -> RotaryTables:
    """Return the tables of the positions start..stop, for the same frequencies in this order of the dimensions."""
    cos, sin = (x[start:stop] for x in rotary.plane_cos_sin)
    tables = [x.repeat_interleave(2, dim=-1) if interleaved else torch.cat((x, x), dim=-1) for x in (cos, sin)]
    full_cos, full_sin = (x.unsqueeze(2).to(rotary.cos.dtype) for x in tables)
    return RotaryTables(full_cos, full_sin, None, interleaved, (cos, sin))


def apply_rotary(x: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotate the first dimensions of x [sequence, batch, heads, head_dim], as many as `rotary` has."""
    dim = rotary.cos.shape[-1]
    rotated, unrotated = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    if rotary.interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        rotated_half = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        rotated_half = torch.cat((-second, first), dim=-1)
    rotated = rotated * rotary.cos + rotated_half * rotary.sin
    return rotated if unrotated is None else torch.cat((rotated, unrotated), dim=-1)
