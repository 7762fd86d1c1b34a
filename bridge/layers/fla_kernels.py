"""Kernels of flash-linear-attention (`fla`) for packed documents, and the choice between them and plain PyTorch.

Its functions take one row [1, tokens, ...] of documents, so the rows of a micro batch are put one after another. They
sum and keep states in fp32.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .delta_rule import DeltaLayout


class FlaKernels(NamedTuple):
    """Functions of flash-linear-attention; queries, keys and values are [1, tokens, heads, dim], and so is the output.

    delta_rule: the gated delta rule; channel_delta_rule: that with a decay per channel; decayed_attention: linear
    attention with a decay per head, which all tokens share or each token has
    """

    conv: Callable
    delta_rule: Callable
    channel_delta_rule: Callable
    decayed_attention: Callable

    def convolve(
        self, x: Tensor, weight: Tensor, layout: DeltaLayout, bias: Tensor | None = None, *, is_activated: bool = True
    ) -> Tensor:
        """Compute `causal_conv` of delta_rule.py: x [tokens, channels] -> a row of documents, [1, tokens, channels]"""
        convolved, _ = self.conv(
            x=to_row(x, layout),
            weight=weight.squeeze(1).to(x.dtype),
            bias=None if bias is None else bias.to(x.dtype),
            activation="silu" if is_activated else None,
            **boundaries(layout),
        )
        return convolved


@cache
def fla_kernels() -> FlaKernels:
    from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]
    from fla.ops.simple_gla import fused_chunk_simple_gla  # pyright: ignore[reportMissingImports]
    from fla.utils import (  # pyright: ignore[reportMissingImports]
        IS_NVIDIA_HOPPER,
        TRITON_ABOVE_3_4_0,
        TRITON_ABOVE_3_7_1,
    )

    # These versions of Triton compile a kernel of the gated delta rule's backward pass wrongly, and fla refuses it.
    is_refused = IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1
    delta_rule = partial(delta_rule_by_channels, chunk_kda) if is_refused else chunk_gated_delta_rule
    # `chunk_simple_gla` keeps the states of all chunks, and waits for the device to learn how many there are.
    return FlaKernels(causal_conv1d, delta_rule, chunk_kda, fused_chunk_simple_gla)


def delta_rule_by_channels(
    channel_delta_rule: Callable, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, **arguments: Any
) -> Any:
    """Compute the gated delta rule by that with a decay per channel: g [1, tokens, heads] is each channel's."""
    return channel_delta_rule(q, k, v, g=g.unsqueeze(-1).expand(*g.shape, k.shape[-1]).contiguous(), **arguments)


def mixer_kernels(dtype: torch.dtype, *, on_gpu: bool, deterministic: bool, has_mamba_kernel: bool = False) -> str:
    """Return the kernels of token mixers: "fla", "mamba_ssm", "torch", or "missing": torch, as none is installed.

    has_mamba_kernel: mamba_ssm has a kernel for this mixer
    """
    # In fp32 their products are in TF32, and their backward passes add in any order.
    if not on_gpu or dtype == torch.float32 or deterministic:
        return "torch"
    if has_mamba_kernel and find_spec("mamba_ssm"):
        return "mamba_ssm"
    return "fla" if find_spec("fla") else "missing"


def to_row(x: Tensor, layout: DeltaLayout) -> Tensor:
    """Reorder [sequence * rows, ...] to [1, rows * sequence, ...], contiguous."""
    return x.unflatten(0, (-1, layout.rows)).transpose(0, 1).flatten(0, 1).unsqueeze(0).contiguous()


def from_row(x: Tensor, layout: DeltaLayout) -> Tensor:
    """Reorder [1, rows * sequence, ...] to [sequence * rows, ...], contiguous."""
    return x.squeeze(0).unflatten(0, (layout.rows, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def boundaries(layout: DeltaLayout) -> dict[str, Tensor]:
    """Return the arguments for documents' boundaries; without those on the CPU, fla fetches them from the device."""
    return {"cu_seqlens": layout.cu_seqlens, "cu_seqlens_cpu": layout.cu_seqlens_cpu}
