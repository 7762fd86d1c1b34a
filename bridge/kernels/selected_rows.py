"""Rows of two tensors that lie side by side, selected by an index, and the reverse: two kernels.

PyTorch's `index_select` and `index_add_` go element by element, and the second adds in any order.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

PIECE = 2048  # elements of a row per program


def split_rows(rows: Tensor, index: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the selected rows' first `width` elements, and the rest: rows [n, size], index [m] -> [m, ...] both."""
    first = rows.new_empty(len(index), width)
    second = rows.new_empty(len(index), rows.shape[1] - width)
    grid, blocks = _launch(len(index), rows.shape[1])
    _split_rows[grid](rows, index, first, second, rows.shape[1], width, **blocks)
    return first, second


def sum_rows(first: Tensor, second: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Return each row's sum over its copies, in fp32 and in their order: the reverse of `split_rows`.

    first, second: [m, width], [m, size - width]
    order [m]: copies by the row that they are of
    starts [n + 1]: the first copy of each row in `order`
    -> [n, size]
    """
    size = first.shape[1] + second.shape[1]
    rows = first.new_empty(len(starts) - 1, size)
    grid, blocks = _launch(len(rows), size)
    _sum_rows[grid](first, second, order, starts, rows, size, first.shape[1], **blocks)
    return rows


def _launch(rows: int, size: int) -> tuple[tuple[int, int], LaunchArgs]:
    piece = min(int(triton.next_power_of_2(size)), PIECE)
    return (rows, int(triton.cdiv(size, piece))), {"PIECE": piece, "num_warps": max(piece // 512, 1)}


@triton.jit
def _split_rows(rows, index, first, second, size, width, PIECE: tl.constexpr):
    target = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    source = tl.load(index + target).to(tl.int64)
    values = tl.load(rows + source * size + column, column < size)
    tl.store(first + target * width + column, values, column < width)
    column -= width
    rest = size - width
    tl.store(second + target * rest + column, values, (column >= 0) & (column < rest))


@triton.jit
def _sum_rows(first, second, order, starts, rows, size, width, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    rest_column, rest = column - width, size - width
    total = tl.zeros((PIECE,), tl.float32)
    for position in range(tl.load(starts + row), tl.load(starts + row + 1)):
        copy = tl.load(order + position).to(tl.int64)
        total += tl.load(first + copy * width + column, column < width, other=0.0).to(tl.float32)
        in_rest = (rest_column >= 0) & (rest_column < rest)
        total += tl.load(second + copy * rest + rest_column, in_rest, other=0.0).to(tl.float32)
    tl.store(rows + row * size + column, total.to(rows.dtype.element_ty), column < size)
