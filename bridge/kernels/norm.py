"""Fused RMSNorm (https://arxiv.org/abs/1910.07467) and LayerNorm (https://arxiv.org/abs/1607.06450)."""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs
from .partial_sums import sum_parts

TILE = 4096  # elements per tile, which has full rows
FORWARD_WARPS, BACKWARD_WARPS, WIDE_WARPS = 4, 8, 16  # wide: rows longer than a tile
PROGRAMS = 3  # per multiprocessor in the backward pass: each sums the weight's gradient over its rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight (1 + weight if zero-centred), computed in fp32. x: [..., size]"""
    return cast(Tensor, _Norm.apply(x, weight, None, eps, zero_centred, False, False))


def rms_norm_with_residual(
    x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm`'s result and x for the residual, whose gradient the backward kernel adds."""
    return cast(tuple[Tensor, Tensor], _Norm.apply(x, weight, None, eps, zero_centred, False, True))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centred: bool = False) -> Tensor:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, computed in fp32. x: [..., size]

    zero_centred: 1 + weight in place of weight.
    """
    return cast(Tensor, _Norm.apply(x, weight, bias, eps, zero_centred, True, False))


def layer_norm_with_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm`'s result and x for the residual, whose gradient the backward kernel adds."""
    return cast(tuple[Tensor, Tensor], _Norm.apply(x, weight, bias, eps, zero_centred, True, True))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        zero_centred: bool,
        centred: bool,
        residual: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute a LayerNorm if `centred`, else an RMSNorm."""
        ctx.zero_centred = zero_centred
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        means = torch.empty_like(scales) if centred else None
        if rows:
            blocks = _blocks(size, FORWARD_WARPS)
            inputs = (*_rows(x), weight, bias, output, scales, means, rows, size, eps)
            _forward[(-(-rows // blocks["DOWN"]),)](*inputs, zero_centred, **blocks)  # pyright: ignore[reportArgumentType]
        ctx.save_for_backward(x, weight, bias, scales, means)
        return (output, x) if residual else output

    @staticmethod
    def backward(ctx, grad: Tensor, grad_residual: Tensor | None = None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, scales, means = ctx.saved_tensors
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        blocks = _blocks(size, BACKWARD_WARPS)
        programs = min(-(-rows // blocks["DOWN"]), PROGRAMS * _multiprocessors(x.device))
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        parts, bias_parts = (
            torch.empty(programs, size, dtype=torch.float32, device=x.device) if needs_grad else None
            for needs_grad in ctx.needs_input_grad[1:3]
        )
        if rows:
            residual = None if grad_residual is None else grad_residual.contiguous()
            _backward[(programs,)](
                *_rows(grad), *_rows(x), residual, weight, scales, means, grad_x, parts, bias_parts, rows, size,
                ctx.zero_centred, **blocks,
            )  # fmt: skip
        grads = (
            None if part is None else sum_parts(parameter, part)
            for parameter, part in ((weight, parts), (bias, bias_parts))
        )
        return grad_x, *grads, None, None, None, None


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return x as [outer, inner, size], without a copy if possible, then inner and the strides of outer and inner."""
    x = x.flatten(0, -3) if x.dim() > 2 else x.reshape(-1, 1, x.shape[-1])
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x, x.shape[1], x.stride(0), x.stride(1)


def _blocks(size: int, warps: int) -> LaunchArgs:
    across = triton.next_power_of_2(size)
    return {"DOWN": max(TILE // across, 1), "ACROSS": across, "num_warps": warps if across <= TILE else WIDE_WARPS}


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x,
    inner,
    outer_stride,
    inner_stride,
    weight,
    bias,
    output,
    scales,
    means,
    rows,
    size,
    eps,
    ZERO_CENTRED: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * DOWN + tl.arange(0, DOWN)[:, None]
    column = tl.arange(0, ACROSS)[None, :]
    mask = (row < rows) & (column < size)
    factor = tl.load(weight + column, column < size, other=0.0).to(tl.float32) + ZERO_CENTRED
    values = tl.load(x + row // inner * outer_stride + row % inner * inner_stride + column, mask, other=0.0)
    values = values.to(tl.float32)
    if means is not None:
        mean = tl.sum(values, 1, keep_dims=True) / size
        tl.store(means + row, mean, row < rows)
        values = tl.where(mask, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / size + eps)
    tl.store(scales + row, scale, row < rows)
    result = values * scale * factor
    if bias is not None:
        result += tl.load(bias + column, column < size, other=0.0).to(tl.float32)
    tl.store(output + row * size + column, result.to(output.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad,
    grad_inner,
    grad_outer_stride,
    grad_inner_stride,
    x,
    inner,
    outer_stride,
    inner_stride,
    residual,
    weight,
    scales,
    means,
    grad_x,
    parts,
    bias_parts,
    rows,
    size,
    ZERO_CENTRED: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    column = tl.arange(0, ACROSS)[None, :]
    factor = tl.load(weight + column, column < size, other=0.0).to(tl.float32) + ZERO_CENTRED
    part = tl.zeros((DOWN, ACROSS), tl.float32)
    bias_part = tl.zeros((DOWN, ACROSS), tl.float32)
    for first in range(tl.program_id(0) * DOWN, rows, tl.num_programs(0) * DOWN):
        row = first + tl.arange(0, DOWN)[:, None].to(tl.int64)
        mask = (row < rows) & (column < size)
        at = row // inner * outer_stride + row % inner * inner_stride + column
        grad_at = row // grad_inner * grad_outer_stride + row % grad_inner * grad_inner_stride + column
        scale = tl.load(scales + row, row < rows, other=0.0)
        normed = tl.load(x + at, mask, other=0.0).to(tl.float32)
        if means is not None:
            normed = tl.where(mask, normed - tl.load(means + row, row < rows, other=0.0), 0.0)
        normed *= scale
        slope = tl.load(grad + grad_at, mask, other=0.0).to(tl.float32)
        if parts is not None:
            part += slope * normed
        if bias_parts is not None:
            bias_part += slope
        slope *= factor
        if means is not None:
            slope -= tl.sum(slope, 1, keep_dims=True) / size
        grad_value = scale * (slope - normed * (tl.sum(slope * normed, 1, keep_dims=True) / size))
        if residual is not None:
            grad_value += tl.load(residual + row * size + column, mask, other=0.0).to(tl.float32)
        tl.store(grad_x + row * size + column, grad_value.to(grad_x.dtype.element_ty), mask)
    if parts is not None:
        summed = tl.sum(part, 0, keep_dims=True)
        tl.store(parts + tl.program_id(0) * size + column, summed, column < size)
    if bias_parts is not None:
        summed = tl.sum(bias_part, 0, keep_dims=True)
        tl.store(bias_parts + tl.program_id(0) * size + column, summed, column < size)
