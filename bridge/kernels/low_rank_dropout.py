"""Low-rank products of rows with dropout, without storing the dropped rows or the mask.

The mask is a function of a random key of the row and of the column, so the backward pass computes it again: both are
mixed by MurmurHash3's 32-bit finalizer, less its last step, which improves low bits.
"""
# Calls of kernels:
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .low_rank_rows import padded_rank

# Rows and columns per iteration and stages, forward and backward
FORWARD_TILE, BACKWARD_TILE = (32, 128, 5), (64, 64, 3)
# Rows per program of the backward kernel, and its largest number of partial sums
CHUNK, MOST_CHUNKS = 512, 32


def draw_keys(x: Tensor) -> Tensor:
    """Return a random key for each of x's rows, int32 [rows], from the generator of x's device."""
    return torch.randint(-(2**31), 2**31, (len(x),), dtype=torch.int32, device=x.device)


def project(x: Tensor, a: Tensor, keys: Tensor, probability: float, scale: float) -> Tensor:
    """Return scale * mask(x) @ a^T: x [rows, in], a [rank, in] -> [rows, rank]. The mask sets elements to 0."""
    x, a = x.contiguous(), a.contiguous()
    (rows, width), rank = x.shape, len(a)
    output = x.new_empty(rows, rank)
    row_tile, column_tile, stages = FORWARD_TILE
    if rows:
        _project[(triton.cdiv(rows, row_tile),)](
            x, a, keys, output, rows, width, rank, _threshold(probability), scale,
            ROWS=row_tile, COLUMNS=column_tile, RANK=padded_rank(rank), num_warps=4, num_stages=stages,
        )  # fmt: skip
    return output


def project_backward(
    grad: Tensor, x: Tensor, a: Tensor, keys: Tensor, probability: float, *, needs_x: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of x and a [rank, in] of mask(x) @ a^T, given its gradient [rows, rank].

    Sums over rows are in fp32 and in a fixed order.
    """
    x, a, grad = x.contiguous(), a.contiguous(), grad.contiguous()
    (rows, width), rank = x.shape, len(a)
    grad_x = torch.empty_like(x) if needs_x else None
    chunk = max(CHUNK, triton.cdiv(rows, MOST_CHUNKS))
    chunks = max(triton.cdiv(rows, chunk), 1)
    partial_sums = a.new_empty(chunks, rank, width, dtype=torch.float32)
    row_tile, column_tile, stages = BACKWARD_TILE
    _backward[(triton.cdiv(width, column_tile), chunks)](
        grad, x, a, keys, grad_x, partial_sums, rows, width, rank, chunk, _threshold(probability),
        ROWS=row_tile, COLUMNS=column_tile, RANK=padded_rank(rank), num_warps=4, num_stages=stages,
    )  # fmt: skip
    return grad_x, partial_sums.sum(0).to(a.dtype)


def _threshold(probability: float) -> int:
    """Return the number that a random int32 is less than with `probability`."""
    return min(round(probability * 2**32), 2**32 - 1) - 2**31


@triton.jit
def _kept(row_keys, column, threshold):
    """Return a mask [rows, columns] of the elements that dropout keeps. row_keys: int32 [rows, 1]"""
    mixed = row_keys.to(tl.uint32, bitcast=True) ^ (column.to(tl.uint32) * 0x9E3779B1)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    return mixed.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def _project(
    x, a, keys, output, rows, width, rank, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_keys, factor = tl.load(keys + row, row < rows, other=0)[:, None], tl.arange(0, RANK)
    values = x + row.to(tl.int64)[:, None] * width
    acc = tl.zeros((ROWS, RANK), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        tile = tl.load(values + column, (row < rows)[:, None] & (column < width), other=0.0)
        tile = tl.where(_kept(row_keys, column, threshold), tile, 0.0)
        factors = tl.load(a + factor[:, None] * width + column, (factor < rank)[:, None] & (column < width), other=0.0)
        acc = tl.dot(tile, tl.trans(factors), acc, input_precision="ieee")
    address = output + row.to(tl.int64)[:, None] * rank + factor[None, :]
    tl.store(address, acc * scale, (row < rows)[:, None] & (factor < rank)[None, :])


@triton.jit
def _backward(
    grad, x, a, keys, grad_x, partial_sums, rows, width, rank, chunk, threshold,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    column, factor = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :], tl.arange(0, RANK)
    in_factors = (factor < rank)[:, None] & (column < width)
    factors = tl.load(a + factor[:, None] * width + column, in_factors, other=0.0)
    acc = tl.zeros((RANK, COLUMNS), tl.float32)
    first = tl.program_id(1) * chunk
    for start in range(first, min(first + chunk, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < min(first + chunk, rows))[:, None]
        address = row.to(tl.int64)[:, None]
        kept = _kept(tl.load(keys + row, row < rows, other=0)[:, None], column, threshold)
        grads = tl.load(grad + address * rank + factor[None, :], inside & (factor < rank)[None, :], other=0.0)
        tile = tl.load(x + address * width + column, inside & (column < width), other=0.0)
        acc = tl.dot(tl.trans(grads), tl.where(kept, tile, 0.0), acc, input_precision="ieee")
        if grad_x is not None:
            back = tl.where(kept, tl.dot(grads, factors, input_precision="ieee"), 0.0)
            tl.store(grad_x + address * width + column, back, inside & (column < width))
    sums = partial_sums + (tl.program_id(1) * rank + factor).to(tl.int64)[:, None] * width
    tl.store(sums + column, acc, in_factors)
