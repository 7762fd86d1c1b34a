"""Embedding whose sparse gradient is added to `main_grad` row by row, without a dense gradient."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs
from .weight_gradient import mark_grad_added

BLOCKS: LaunchArgs = {"ROWS": 16, "COLUMNS": 256}  # block of gradients that a program sums per iteration


@triton.jit
def _add_rows_kernel(total, ids, order, grads, rows, size, places, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the gradients of all positions of an id to its row, in the program of its first position."""
    start = tl.program_id(0)
    row = tl.load(ids + start)
    first = row != tl.load(ids + start - 1, mask=start > 0, other=-1)
    if first & (row >= 0) & (row < rows):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        target = total + row.to(tl.int64) * size + column
        row_sum = tl.load(target, mask=column < size, other=0.0)
        more = True
        while more:
            place = start + tl.arange(0, ROWS)
            is_same = tl.load(ids + place, mask=place < places, other=-1) == row
            source = tl.load(order + place, mask=is_same, other=0)[:, None] * size + column[None, :]
            x = tl.load(grads + source, mask=is_same[:, None] & (column < size)[None, :], other=0.0).to(tl.float32)
            row_sum += tl.sum(x, 0)
            start += ROWS
            more = tl.min(is_same.to(tl.int32), 0) == 1
        tl.store(target, row_sum, mask=column < size)


def add_rows(total: Tensor, ids: Tensor, grads: Tensor) -> None:
    """total[ids] += grads, in a fixed order: total [rows, size] fp32; ids [places]; grads [places, size].

    Ids below 0 or beyond the last row are ignored.
    """
    ids, order = ids.to(torch.int32).sort(stable=True)
    rows, size = total.shape
    if len(ids):
        grid = (len(ids), triton.cdiv(size, BLOCKS["COLUMNS"]))
        _add_rows_kernel[grid](total, ids, order, grads.contiguous(), rows, size, len(ids), **BLOCKS)


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
