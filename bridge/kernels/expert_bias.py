"""Biases of experts on rows that are sorted by expert, and the sums of their gradients."""

from typing import cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

ROW_TILE = 1024  # elements of a row at a time
ALIGNED_COLUMNS = 8  # grouped products need rows of 16 bytes


def row_experts(ends: Tensor, rows: int) -> Tensor:
    """Return the expert of each row, int32 [rows]. ends: int32 [experts], end of each expert's rows"""
    numbers = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, numbers, right=True, out_int32=True)


def expert_sums(rows: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum each expert's rows, times their weights if there are any, in fp32: rows [rows, width] -> [experts, width].

    On a GPU in bf16 by a grouped product, whose order of additions is fixed. A weight is two bf16 columns there, its
    rounded value and the rest.
    """
    if not (rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows)):
        sums = rows.new_zeros(len(ends), rows.shape[1], dtype=torch.float32)
        values = rows.float() if weights is None else rows.float() * weights.float().unsqueeze(1)
        return sums.index_add_(0, row_experts(ends, len(rows)), values)
    if weights is None:
        columns = rows.new_ones(len(rows), ALIGNED_COLUMNS)
        return F.grouped_mm(columns.t(), rows, offs=ends)[:, 0].float()
    high = weights.to(rows.dtype)
    low = (weights.float() - high.float()).to(rows.dtype)
    columns = F.pad(torch.stack((high, low), dim=1), (0, ALIGNED_COLUMNS - 2))
    return F.grouped_mm(columns.t(), rows, offs=ends)[:, :2].float().sum(dim=1)


def add_expert_bias(x: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    """Add to each row its expert's bias, times the row's weight if there is one.

    x [rows, width], sorted by expert; bias [experts, width]; ends int32 [experts]; weights [rows] -> [rows, width]
    """
    return cast(Tensor, _AddBias.apply(x.contiguous(), bias.contiguous(), ends, weights))


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
        output = torch.empty_like(x)
        experts = row_experts(ends, len(x))
        if len(x):
            grid = (len(x), triton.cdiv(x.shape[1], ROW_TILE))
            _add[grid](x, bias, experts, weights, output, x.shape[1], TILE=ROW_TILE)  # type: ignore[arg-type]
        ctx.save_for_backward(bias, ends, weights, experts)
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        bias, ends, weights, experts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_bias = expert_sums(grad, ends, weights).to(bias.dtype) if ctx.needs_input_grad[1] else None
        grad_weights = None
        if weights is not None and ctx.needs_input_grad[3]:
            grad_weights = torch.empty_like(weights)
            if len(grad):
                _dot[(len(grad),)](grad, bias, experts, grad_weights, grad.shape[1], TILE=ROW_TILE)  # type: ignore[arg-type]
        return grad, grad_bias, None, grad_weights


@triton.jit
def _add(x, bias, experts, weights, output, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    expert = tl.load(experts + row).to(tl.int64)
    added = tl.load(bias + expert * width + column, mask, other=0.0).to(tl.float32)
    if weights is not None:
        added *= tl.load(weights + row).to(tl.float32)
    value = tl.load(x + row * width + column, mask, other=0.0).to(tl.float32) + added
    tl.store(output + row * width + column, value.to(output.dtype.element_ty), mask)


@triton.jit
def _dot(grad, bias, experts, result, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(experts + row).to(tl.int64)
    products = tl.zeros((TILE,), tl.float32)
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        mask = column < width
        slopes = tl.load(grad + row * width + column, mask, other=0.0).to(tl.float32)
        products += slopes * tl.load(bias + expert * width + column, mask, other=0.0).to(tl.float32)
    tl.store(result + row, tl.sum(products, 0).to(result.dtype.element_ty))
