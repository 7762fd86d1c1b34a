"""Rotary position embeddings, indexed by position ids: packed documents and context parallelism need nothing more."""

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(dim: int, base: float, scaling: dict[str, Any] | None) -> Tensor:
    """The rotation speeds of the `dim / 2` planes, fp32, as transformers' rope functions give them.

    `scaling` is None or {"rope_type": "linear" | "llama3", ...} with the keys of a Hugging Face config. Llama 3's rule
    (https://arxiv.org/abs/2407.21783): long waves are stretched by `factor`, short ones kept, those between blended.
    Raises ValueError for a rope type that is not known.
    """
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = (scaling or {}).get("rope_type", "default")
    if scaling is None or kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        low, high, original = (
            scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        wavelengths = 2 * math.pi / frequencies
        # 0 where the wave is long (stretched whole), 1 where it is short (kept).
        kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        return kept * frequencies + (1 - kept) * frequencies / scaling["factor"]
    raise ValueError(f"rope type {kind!r} is not supported: only default, linear and llama3 are")


def angles(position_ids: Tensor, frequencies: Tensor) -> Tensor:
    """[batch, sequence] positions -> fp32 angles [sequence, batch, 1, dim], both halves alike."""
    turns = position_ids.t().unsqueeze(-1).float() * frequencies  # [sequence, batch, dim / 2]
    return torch.cat((turns, turns), dim=-1).unsqueeze(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [sequence, batch, heads, head_dim] by cos and sin [sequence, batch, 1, dim <= head_dim] of its dtype."""
    dim = cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if rest is None else torch.cat((turned, rest), dim=-1)
