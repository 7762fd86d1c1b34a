"""Fused SwiGLU and variants, forward and backward. The backward pass recomputes all values from the input."""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs
from .expert_bias import expert_sums, row_experts

TILE = 4096  # output elements per tile
WARPS = 8


def swiglu(
    x: Tensor,
    weights: Tensor | None = None,
    *,
    bias: tuple[Tensor, Tensor] | None = None,
    slope: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Return g sigmoid(slope g) (u + offset) times the row's weight, where x [..., 2 * width] has the gates g, then u.

    weights: one per row, or None -> [..., width]. limit: clamp g to at most limit, and u to [-limit, limit].
    bias: added to x first: one of each expert [experts, 2 * width], and the ends of the experts' rows, int32 [experts].
    A slope of 1 is SiLU (https://arxiv.org/abs/2002.05202), 1.702 the quick GELU. Computed in fp32.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if weights is not None:
        weights = weights.reshape(-1).contiguous()
    biases, ends = bias or (None, None)
    biases = biases if biases is None else biases.contiguous()
    output = cast(Tensor, _SwiGLU.apply(rows, weights, biases, ends, slope, limit, offset))
    return output.view(*x.shape[:-1], output.shape[-1])


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor | None, bias: Tensor | None, ends: Tensor | None, *form: Any) -> Tensor:
        rows, width = len(x), x.shape[1] // 2
        experts = row_experts(ends, rows) if ends is not None else None
        output = x.new_empty(rows, width)
        if rows:
            grid, blocks = _blocks(rows, width, whole_rows=False)
            _forward[grid](x, weights, bias, experts, output, rows, width, x.stride(0), *form, **blocks)
        ctx.save_for_backward(x, weights, bias, ends, experts)
        ctx.form = form
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, bias, ends, experts = ctx.saved_tensors
        grad = grad.contiguous()
        rows, width = grad.shape
        grad_x = x.new_empty(x.shape)
        grad_weights = torch.empty_like(weights) if ctx.needs_input_grad[1] else None
        if rows:
            # The gradient of a row's weight is a sum over the row, so one program handles the full row.
            grid, blocks = _blocks(rows, width, whole_rows=grad_weights is not None)
            _backward[grid](
                grad, x, weights, bias, experts, grad_x, grad_weights, rows, width, x.stride(0), *ctx.form, **blocks
            )
        grad_bias = expert_sums(grad_x, ends).to(bias.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weights, grad_bias, None, None, None, None


def _blocks(rows: int, width: int, *, whole_rows: bool) -> tuple[tuple[int], LaunchArgs]:
    """Return the grid and the block sizes: columns are the largest power of two that divides the width, 128 to 1024."""
    columns = min(max(width & -width, 128), 1024)
    across = 1 if whole_rows else -(-width // columns)
    down = TILE // columns
    grid = (-(-rows // down) * across,)
    return grid, {"DOWN": down, "COLUMNS": columns, "ACROSS": across, "num_warps": WARPS}


@triton.jit
def _halves(x, bias, experts, row, column, rows, width, stride, mask, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Return the clamped gate and up, and whether each is within the limit."""
    at = row * stride + column
    gate = tl.load(x + at, mask, other=0.0).to(tl.float32)
    up = tl.load(x + at + width, mask, other=0.0).to(tl.float32)
    if bias is not None:
        at = tl.load(experts + row, row < rows, other=0).to(tl.int64) * width * 2 + column
        gate += tl.load(bias + at, mask, other=0.0).to(tl.float32)
        up += tl.load(bias + at + width, mask, other=0.0).to(tl.float32)
    gate_within, up_within = mask, mask
    if LIMIT is not None:
        gate_within, up_within = gate <= LIMIT, tl.abs(up) <= LIMIT
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up + OFFSET, gate_within, up_within


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x,
    weights,
    bias,
    experts,
    output,
    rows,
    width,
    stride,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    DOWN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr,
):
    row = (tl.program_id(0) // ACROSS).to(tl.int64) * DOWN + tl.arange(0, DOWN)[:, None]
    column = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < width)
    gate, up, _, _ = _halves(x, bias, experts, row, column, rows, width, stride, mask, LIMIT, OFFSET)  # pyright: ignore[reportGeneralTypeIssues]
    result = gate * tl.sigmoid(SLOPE * gate) * up
    if weights is not None:
        result *= tl.load(weights + row, row < rows, other=0.0).to(tl.float32)
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad,
    x,
    weights,
    bias,
    experts,
    grad_x,
    grad_weights,
    rows,
    width,
    stride,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    DOWN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr,
):
    row = (tl.program_id(0) // ACROSS).to(tl.int64) * DOWN + tl.arange(0, DOWN)[:, None]
    first = tl.program_id(0) % ACROSS * COLUMNS
    weight, grad_weight = 1.0, tl.zeros((DOWN, 1), tl.float32)
    if weights is not None:
        weight = tl.load(weights + row, row < rows, other=0.0).to(tl.float32)
    for start in range(first, width, ACROSS * COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = (row < rows) & (column < width)
        gate, up, gate_within, up_within = _halves(
            x, bias, experts, row, column, rows, width, stride, mask, LIMIT, OFFSET
        )  # pyright: ignore[reportGeneralTypeIssues]
        slope = tl.load(grad + row * width + column, mask, other=0.0).to(tl.float32)
        share = tl.sigmoid(SLOPE * gate)
        if grad_weights is not None:
            grad_weight += tl.sum(slope * gate * share * up, 1, keep_dims=True)
        slope *= weight
        grad_gate = slope * up * share * (1 + SLOPE * gate * (1 - share))
        grad_up = slope * gate * share
        if LIMIT is not None:
            grad_gate, grad_up = tl.where(gate_within, grad_gate, 0.0), tl.where(up_within, grad_up, 0.0)
        target = grad_x + row * width * 2 + column
        tl.store(target, grad_gate.to(grad_x.dtype.element_ty), mask)
        tl.store(target + width, grad_up.to(grad_x.dtype.element_ty), mask)
    if grad_weights is not None:
        tl.store(grad_weights + row, grad_weight.to(grad_weights.dtype.element_ty), row < rows)
