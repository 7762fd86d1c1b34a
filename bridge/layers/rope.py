"""Rotary position embeddings, indexed by position ids: packed documents and context parallelism need nothing more."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..mapping.param_mapping import HfConfig, Rope


@dataclass(frozen=True)
class RotaryRule:
    """A rule of rotary embeddings, on a device."""

    frequencies: Tensor  # [planes] fp32
    factor: float = 1.0  # of cos and sin
    interleaved: bool = False
    original: int = 0  # with `long`: documents longer than this turn by `long` instead
    long: Tensor | None = None


class RotaryTables(NamedTuple):
    """Cosines and sines of a micro batch by one rope rule, in the model's dtype; angles in fp32."""

    cos: Tensor  # [sequence, batch, 1, dim]
    sin: Tensor
    angles: Tensor | None  # [sequence, 1, 1, dim], contiguous: one row's; None where cos and sin are not just of them
    interleaved: bool
    exact: tuple[Tensor, Tensor]  # cos and sin of the planes, [sequence, batch, dim / 2] fp32


def make_rotary_rule(rope: Rope, device: torch.device) -> RotaryRule:
    """Raises ValueError for a rope type that is not known."""
    scaling = rope.scaling or {}
    frequencies = inverse_frequencies(rope.dim, rope.base, scaling).to(device)
    long = None
    if scaling.get("rope_type") == "longrope":
        factors = scaling | {"short_factor": scaling["long_factor"]}
        long = inverse_frequencies(rope.dim, rope.base, factors).to(device)
    original = scaling.get("original_max_position_embeddings", 0)
    return RotaryRule(frequencies, scaling.get("attention_factor", 1.0), rope.interleaved, original, long)


def inverse_frequencies(dim: int, base: float, scaling: HfConfig | None) -> Tensor:
    """Return the rotation speeds of the `dim / 2` planes, fp32, as transformers' rope functions give them.

    `scaling` is None or {"rope_type": ...} with the keys of a Hugging Face config, none left out. Linear; Llama 3
    (https://arxiv.org/abs/2407.21783: long waves are stretched by `factor`, short ones kept, those between blended);
    YaRN (https://arxiv.org/abs/2309.00071, section 3.2); LongRoPE (https://arxiv.org/abs/2402.13753: a factor for each
    plane). Raises ValueError for a rope type that is not known.
    """
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = (scaling or {}).get("rope_type", "default")
    if not scaling or kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "longrope":
        return frequencies / torch.tensor(scaling["short_factor"], dtype=torch.float32)
    if kind == "yarn":
        kept = _yarn_kept(dim, base, scaling)
    elif kind == "llama3":
        low, high, original = (
            scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        wavelengths = 2 * math.pi / frequencies
        # 0 where the wave is long (stretched whole), 1 where it is short (kept).
        kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    else:
        raise ValueError(f"rope type {kind!r} is not supported: only default, linear, llama3, yarn and longrope are")
    return kept * frequencies + (1 - kept) * frequencies / scaling["factor"]


def _yarn_kept(dim: int, base: float, scaling: HfConfig) -> Tensor:
    """[planes]: 1 for planes that turn more than beta_fast times within the original length, 0 for those that turn
    less than beta_slow times, and a line over the planes between."""

    def plane(rotary: float) -> float:
        return dim * math.log(scaling["original_max_position_embeddings"] / (rotary * 2 * math.pi)) / 2 / math.log(base)

    low, high = plane(scaling["beta_fast"]), plane(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def make_rotary_tables(
    position_ids: Tensor, rope: RotaryRule, long: Callable[[int], Tensor | bool], dtype: torch.dtype
) -> RotaryTables:
    """Return the turns of position_ids [batch, sequence].

    long(length) tells which tokens are of documents longer than that: all or none, or [sequence].
    """
    frequencies = rope.frequencies
    if rope.long is not None:
        which = long(rope.original)
        if isinstance(which, Tensor):
            frequencies = torch.where(which[:, None, None], rope.long, frequencies)
        elif which:
            frequencies = rope.long
    planes = position_ids.t().unsqueeze(-1).float() * frequencies  # [sequence, batch, dim / 2]
    angles = planes.repeat_interleave(2, dim=-1) if rope.interleaved else torch.cat((planes, planes), dim=-1)
    angles = angles.unsqueeze(2)
    cos, sin = angles.cos(), angles.sin()
    if rope.factor != 1.0:
        cos, sin = cos * rope.factor, sin * rope.factor
    # Positions are the same in every row where rows are padded, and packed tokens are one row.
    of_one_row = angles[:, :1].contiguous() if rope.factor == 1.0 else None
    one_of_each = slice(None, None, 2) if rope.interleaved else slice(planes.shape[-1])
    exact = cos[:, :, 0, one_of_each], sin[:, :, 0, one_of_each]
    return RotaryTables(cos.to(dtype), sin.to(dtype), of_one_row, rope.interleaved, exact)


def apply_rotary(x: Tensor, rotary: RotaryTables) -> Tensor:
    """Turn the first dimensions of x [sequence, batch, heads, head_dim], as many as the turns have."""
    dim = rotary.cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        across = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    turned = turned * rotary.cos + across * rotary.sin
    return turned if rest is None else torch.cat((turned, rest), dim=-1)
