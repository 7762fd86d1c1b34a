"""Low-rank products of rows that are sorted by expert, and their gradients.

`ends`, int32 [experts], has the end of each expert's rows. The products read or write wide rows once and are bound by
memory; grouped matrix products would use tiles that are mostly empty.
"""
# Calls of kernels:
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 64, 128, 4  # tiles of wide rows


def project_rows(x: Tensor, factors: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Return scale * x @ factors[expert]^T: x [rows, width], factors [experts, rank, width] -> [rows, rank].

    factors may have any strides.
    """
    x = x.contiguous()
    output = x.new_empty(len(x), factors.shape[1])
    if len(x):
        _project[_grid(x, ends)](x, factors, ends, output, scale, *_sizes(x, factors), **_tiles(factors))
    return output


def add_low_rank(x: Tensor, low_rank: Tensor, factors: Tensor, ends: Tensor) -> None:
    """x += low_rank @ factors[expert]: x [rows, width], low_rank [rows, rank], factors [experts, rank, width].

    x and low_rank are contiguous; factors may have any strides.
    """
    if len(x):
        _add[_grid(x, ends)](x, low_rank, factors, ends, *_sizes(x, factors), **_tiles(factors))


def factor_gradients(x: Tensor, low_rank: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's low_rank^T @ x: x [rows, width], low_rank [rows, rank] -> [experts, rank, width].

    Sums are in fp32. Each element is computed by one program, so their order is fixed.
    """
    x, low_rank = x.contiguous(), low_rank.contiguous()
    rank, width = low_rank.shape[1], x.shape[1]
    output = x.new_empty(len(ends), rank, width)
    _gradients[(triton.cdiv(width, COLUMNS), len(ends))](
        x, low_rank, ends, output, width, rank, ROWS=ROWS, COLUMNS=COLUMNS, RANK=padded_rank(rank), num_warps=WARPS
    )
    return output


def _grid(x: Tensor, ends: Tensor) -> tuple[int]:
    """Return a grid with a program for each tile of an expert's rows, of which the host knows only a bound."""
    return (-(-len(x) // ROWS) + len(ends),)


def _sizes(x: Tensor, factors: Tensor) -> tuple[int, ...]:
    experts, rank, width = factors.shape
    return (experts, width, rank, *factors.stride())


def _tiles(factors: Tensor) -> dict[str, int]:
    experts, rank, _ = factors.shape
    padded = 1 << (experts - 1).bit_length()
    return {"EXPERTS": padded, "ROWS": ROWS, "COLUMNS": COLUMNS, "RANK": padded_rank(rank), "num_warps": WARPS}


def padded_rank(rank: int) -> int:
    """Return the rank of a kernel's tiles."""
    return max(16, 1 << (rank - 1).bit_length())


@triton.jit
def _rows_of_tile(ends, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's expert, its first row and the end of the expert's rows; a tile past all has no rows."""
    number = tl.arange(0, EXPERTS)
    stop = tl.load(ends + number, number < experts, other=0)
    start = tl.load(ends + number - 1, (number > 0) & (number < experts), other=0)
    tiles = tl.where(number < experts, tl.cdiv(stop - start, ROWS), 0)
    last = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((last <= tile).to(tl.int32), 0)
    is_ours = number == expert
    before = tl.sum(tl.where(is_ours, last - tiles, 0), 0)
    first = tl.sum(tl.where(is_ours, start, 0), 0) + (tile - before) * ROWS
    return expert, first, tl.sum(tl.where(is_ours, stop, 0), 0)


@triton.jit
def _project(
    x, factors, ends, output, scale, experts, width, rank, expert_stride, rank_stride, column_stride,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    expert, first, end = _rows_of_tile(ends, experts, EXPERTS, ROWS)
    if first < end:
        row, factor = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None], tl.arange(0, RANK)
        matrix = factors + expert.to(tl.int64) * expert_stride + factor[:, None] * rank_stride
        acc = tl.zeros((ROWS, RANK), tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            tile = tl.load(x + row * width + column, (row < end) & (column < width), other=0.0)
            part = tl.load(matrix + column * column_stride, (factor < rank)[:, None] & (column < width), other=0.0)
            acc = tl.dot(tile, tl.trans(part), acc, input_precision="ieee")
        tl.store(output + row * rank + factor[None, :], acc * scale, (row < end) & (factor < rank)[None, :])


@triton.jit
def _add(
    x, low_rank, factors, ends, experts, width, rank, expert_stride, rank_stride, column_stride,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    expert, first, end = _rows_of_tile(ends, experts, EXPERTS, ROWS)
    if first < end:
        row, factor = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None], tl.arange(0, RANK)
        matrix = factors + expert.to(tl.int64) * expert_stride + factor[:, None] * rank_stride
        rows = tl.load(low_rank + row * rank + factor[None, :], (row < end) & (factor < rank)[None, :], other=0.0)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside = (row < end) & (column < width)
            part = tl.load(matrix + column * column_stride, (factor < rank)[:, None] & (column < width), other=0.0)
            tile = tl.load(x + row * width + column, inside, other=0.0).to(tl.float32)
            tl.store(x + row * width + column, tl.dot(rows, part, tile, input_precision="ieee"), inside)


@triton.jit
def _gradients(x, low_rank, ends, output, width, rank, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr):
    expert = tl.program_id(1)
    column, factor = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :], tl.arange(0, RANK)
    first, end = tl.load(ends + expert - 1, expert > 0, other=0), tl.load(ends + expert)
    acc = tl.zeros((RANK, COLUMNS), tl.float32)
    for start in range(first, end, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        narrow = tl.load(low_rank + row * rank + factor[None, :], (row < end) & (factor < rank)[None, :], other=0.0)
        tile = tl.load(x + row * width + column, (row < end) & (column < width), other=0.0)
        acc = tl.dot(tl.trans(narrow), tile, acc, input_precision="ieee")
    sums = output + (expert.to(tl.int64) * rank + factor)[:, None] * width
    tl.store(sums + column, acc, (factor < rank)[:, None] & (column < width))
