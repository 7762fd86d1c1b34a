"""Fused RMSNorm (https://arxiv.org/abs/1910.07467) and LayerNorm (https://arxiv.org/abs/1607.06450)."""
# Calls of kernels:
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

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
    kernel = NormKernel(eps, is_centred=False, is_zero_centred=zero_centred)
    return cast(Tensor, _Norm.apply(x, weight, None, kernel, False))


def rms_norm_with_residual(
    x: Tensor, weight: Tensor, eps: float, *, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm`'s result and x for the residual, whose gradient the backward kernel adds."""
    kernel = NormKernel(eps, is_centred=False, is_zero_centred=zero_centred)
    return cast(tuple[Tensor, Tensor], _Norm.apply(x, weight, None, kernel, True))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centred: bool = False) -> Tensor:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, computed in fp32. x: [..., size]

    zero_centred: 1 + weight in place of weight.
    """
    kernel = NormKernel(eps, is_centred=True, is_zero_centred=zero_centred)
    return cast(Tensor, _Norm.apply(x, weight, bias, kernel, False))


def layer_norm_with_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm`'s result and x for the residual, whose gradient the backward kernel adds."""
    kernel = NormKernel(eps, is_centred=True, is_zero_centred=zero_centred)
    return cast(tuple[Tensor, Tensor], _Norm.apply(x, weight, bias, kernel, True))


class NormKernel(NamedTuple):
    """Forward and backward pass of a norm: a LayerNorm if centred, else an RMSNorm."""

    eps: float
    is_centred: bool
    is_zero_centred: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, and each row's statistics for the backward pass."""
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        statistics = x.new_empty(2 * rows if self.is_centred else rows, dtype=torch.float32)
        if rows:
            blocks = _blocks(size, FORWARD_WARPS)
            sizes = rows, size, self.eps, self.is_centred, self.is_zero_centred
            _forward[(-(-rows // blocks["DOWN"]),)](*_rows(x), weight, bias, output, statistics, *sizes, **blocks)
        return output, statistics

    def backward(
        self,
        inputs: Sequence[Any],
        statistics: Tensor,
        grad: Tensor,
        grad_residual: Tensor | None,
        needs_grad: Sequence[bool],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of x, to which the residual's is added, and of weight and bias where they need one.

        inputs: of the forward pass. needs_grad: of weight and bias
        """
        x, weight, bias = inputs
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        blocks = _blocks(size, BACKWARD_WARPS)
        programs = min(-(-rows // blocks["DOWN"]), PROGRAMS * _multiprocessors(x.device))
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        needs_weight, needs_bias = needs_grad
        parts = None
        if needs_weight or needs_bias:
            parts = x.new_empty((programs, needs_weight + needs_bias, size), dtype=torch.float32)
        if rows:
            residual = None if grad_residual is None else grad_residual.contiguous()
            switches = self.is_centred, self.is_zero_centred, needs_weight, needs_bias
            _backward[(programs,)](
                *_rows(grad), *_rows(x), residual, weight, statistics, grad_x, parts, rows, size, *switches, **blocks
            )
        if parts is None:
            return grad_x, None, None
        sums = sum_parts(
            [parameter for parameter, needs in ((weight, needs_weight), (bias, needs_bias)) if needs], parts
        )
        return grad_x, sums[0] if needs_weight else None, sums[-1] if needs_bias else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: NormKernel, residual: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        output, statistics = kernel.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.kernel = kernel
        return (output, x) if residual else output

    @staticmethod
    def backward(ctx, grad: Tensor, grad_residual: Tensor | None = None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, statistics = ctx.saved_tensors
        grads = ctx.kernel.backward(inputs, statistics, grad, grad_residual, ctx.needs_input_grad[1:3])
        return *grads, None, None


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return x, without a copy if possible, and its layout [outer, inner, size]: inner, strides of outer and inner."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() < 3:
        return x, 1, x.stride(0), 0
    if x.dim() > 3:
        x = x.flatten(0, -3)
    return x, x.shape[1], x.stride(0), x.stride(1)


@cache
def _blocks(size: int, warps: int) -> LaunchArgs:
    across = triton.next_power_of_2(size)
    return {"DOWN": max(TILE // across, 1), "ACROSS": across, "num_warps": warps if across <= TILE else WIDE_WARPS}


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# Both kernels have each row's reciprocal deviation in `statistics`, and behind them the means if `CENTRED`.
@triton.jit(do_not_specialize=["rows"])
def _forward(
    x,
    inner,
    outer_stride,
    inner_stride,
    weight,
    bias,
    output,
    statistics,
    rows,
    size,
    eps,
    CENTRED: tl.constexpr,
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
    if CENTRED:
        mean = tl.sum(values, 1, keep_dims=True) / size
        tl.store(statistics + rows + row, mean, row < rows)
        values = tl.where(mask, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / size + eps)
    tl.store(statistics + row, scale, row < rows)
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
    statistics,
    grad_x,
    parts,
    rows,
    size,
    CENTRED: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
        scale = tl.load(statistics + row, row < rows, other=0.0)
        normed = tl.load(x + at, mask, other=0.0).to(tl.float32)
        if CENTRED:
            normed = tl.where(mask, normed - tl.load(statistics + rows + row, row < rows, other=0.0), 0.0)
        normed *= scale
        slope = tl.load(grad + grad_at, mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            part += slope * normed
        if HAS_BIAS:
            bias_part += slope
        slope *= factor
        if CENTRED:
            slope -= tl.sum(slope, 1, keep_dims=True) / size
        grad_value = scale * (slope - normed * (tl.sum(slope * normed, 1, keep_dims=True) / size))
        if residual is not None:
            grad_value += tl.load(residual + row * size + column, mask, other=0.0).to(tl.float32)
        tl.store(grad_x + row * size + column, grad_value.to(grad_x.dtype.element_ty), mask)
    if HAS_WEIGHT or HAS_BIAS:
        parts += tl.program_id(0) * (HAS_WEIGHT + HAS_BIAS) * size
    if HAS_WEIGHT:
        tl.store(parts + column, tl.sum(part, 0, keep_dims=True), column < size)
    if HAS_BIAS:
        tl.store(parts + HAS_WEIGHT * size + column, tl.sum(bias_part, 0, keep_dims=True), column < size)
