"""Embedding whose sparse gradient is added to `main_grad` row by row, without a dense gradient."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs
from .weight_gradient import mark_grad_added

PLACES, COLUMNS = 32, 256  # tile of gradients that a program sums
BLOCKS: LaunchArgs = {"PLACES": PLACES, "COLUMNS": COLUMNS, "num_warps": 1}


@triton.jit
def _add_to_row(total, row, rows, size, column, more):
    if (row >= 0) & (row < rows):
        target = total + row.to(tl.int64) * size + column
        tl.store(target, tl.load(target, mask=column < size, other=0.0) + more, mask=column < size)


@triton.jit
def _add_rows(
    total, ids, order, grads, edges, rows, size, places, PLACES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum the gradients of each id in a block of sorted places, and add them to its row.

    The sums of ids that are in other blocks too go to `edges` [blocks, 2, size]: [0] has the first id's if it is in
    the block before too, [1] the last id's if it is in the block after too and not in [0].
    """
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = block * PLACES
    end = tl.minimum(start + PLACES, places)
    row = tl.load(ids + start)
    is_continued = row == tl.load(ids + start - 1, mask=start > 0, other=-1)
    edges += block.to(tl.int64) * 2 * size + column
    row_sum = tl.zeros((COLUMNS,), tl.float32)
    for place in range(start, end):
        place_row = tl.load(ids + place)
        if place_row != row:
            if is_continued:
                tl.store(edges, row_sum, mask=column < size)
            else:
                _add_to_row(total, row, rows, size, column, row_sum)
            is_continued = False
            row_sum = tl.zeros((COLUMNS,), tl.float32)
            row = place_row
        source = grads + tl.load(order + place) * size + column
        row_sum += tl.load(source, mask=column < size, other=0.0).to(tl.float32)
    goes_on = row == tl.load(ids + end, mask=end < places, other=-1)
    if is_continued:
        tl.store(edges, row_sum, mask=column < size)
    elif goes_on:
        tl.store(edges + size, row_sum, mask=column < size)
    else:
        _add_to_row(total, row, rows, size, column, row_sum)


@triton.jit
def _add_edges(total, ids, edges, rows, size, places, PLACES: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the sums of an id that is in more than one block to its row, in the program of the first one."""
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    last = block * PLACES + PLACES - 1
    row = tl.load(ids + last, mask=last < places, other=-1)
    begins_here = row != tl.load(ids + block * PLACES - 1, mask=block > 0, other=-1)
    next_row = tl.load(ids + last + 1, mask=last + 1 < places, other=-1)
    if begins_here & (row == next_row) & (row >= 0):
        block_edges = edges + block.to(tl.int64) * 2 * size + column
        row_sum = tl.load(block_edges + size, mask=column < size, other=0.0)
        first = last + 1
        while next_row == row:
            block_edges += 2 * size
            row_sum += tl.load(block_edges, mask=column < size, other=0.0)
            first += PLACES
            next_row = tl.load(ids + first, mask=first < places, other=-1)
        _add_to_row(total, row, rows, size, column, row_sum)


def add_rows(total: Tensor, ids: Tensor, grads: Tensor) -> None:
    """total[ids] += grads, in a fixed order: total [rows, size] fp32; ids [places]; grads [places, size].

    Ids below 0 or beyond the last row are ignored.
    """
    if not len(ids):
        return
    ids, order = ids.to(torch.int32).sort(stable=True)
    rows, size = total.shape
    blocks = -(-len(ids) // PLACES)
    grid = (blocks, triton.cdiv(size, COLUMNS))
    edges = total.new_empty(blocks, 2, *total.shape[1:])
    _add_rows[grid](total, ids, order, grads.contiguous(), edges, rows, size, len(ids), **BLOCKS)
    _add_edges[grid](total, ids, edges, rows, size, len(ids), **BLOCKS)


class Embedding(torch.autograd.Function):
    """weight [rows, size] with `main_grad`, ids [...] -> [..., size]. is_partial: ids without a row give 0."""

    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, is_partial: bool) -> Tensor:
        ctx.save_for_backward(weight, ids)
        if not is_partial:
            return F.embedding(ids, weight)
        held = ids.clamp(0, len(weight) - 1)
        return F.embedding(held, weight).masked_fill_((held != ids).unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx, grads: Tensor):  # type: ignore[override]
        weight, ids = ctx.saved_tensors
        add_rows(weight.main_grad, ids.flatten(), grads.reshape(-1, grads.shape[-1]))
        return mark_grad_added(weight), None, None
