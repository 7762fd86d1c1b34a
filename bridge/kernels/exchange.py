"""Exchange of tokens with the experts of other GPUs, through memory that every GPU of a group reads.

Each rank has a region of equal layout, and a table of the regions' addresses. A rank writes to its own region only, and
reads the others' after a barrier (layers/peer_exchange.py). A token's row is read once by each rank with experts of
the token, and comes back as one row, the sum of that rank's outputs.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

PIECE = 2048  # elements of a row per program
MAX_PROGRAMS = 128  # limit of programs that compute a row map
CHOICES = 1024  # indices of experts that a program counts at a time
HEADER = tl.constexpr(128)  # bytes at the start of a region: the rank's number of tokens, int32
GRANULE = 64  # a capacity is a multiple of it, so that all parts of a region begin at multiples of 64 bytes


@dataclass(frozen=True)
class RegionLayout:
    """Places of a region's parts, in bytes from its start.

    A region holds either tokens for the experts, [tokens: HEADER, indices of experts, their weights, rows], or sums for
    the other ranks' tokens, [ranks - 1, tokens: gradients of weights, then sums of rows].
    """

    ranks: int
    topk: int
    width: int  # elements of a row
    row_size: int  # bytes of an element of a row
    weight_size: int  # bytes of a weight
    capacity: int = 0  # tokens per rank

    def with_capacity(self, tokens: int) -> "RegionLayout":
        """Return the smallest layout for `tokens` per rank."""
        return replace(self, capacity=triton.cdiv(tokens, GRANULE) * GRANULE)

    def fitting(self, size: int) -> "RegionLayout":
        """Return the largest layout for regions of `size` bytes."""
        return replace(self, capacity=max(size - HEADER.value, 0) // (self._token_size * GRANULE) * GRANULE)

    @property
    def size(self) -> int:
        """Bytes of a region."""
        return HEADER.value + self.capacity * self._token_size

    @property
    def _token_size(self) -> int:
        row = self.topk * self.weight_size + self.width * self.row_size
        return max(self.topk * 4 + row, (self.ranks - 1) * row)

    @property
    def weights(self) -> int:
        return HEADER.value + self.capacity * self.topk * 4

    @property
    def rows(self) -> int:
        return self.weights + self.capacity * self.topk * self.weight_size

    @property
    def sums(self) -> int:
        return (self.ranks - 1) * self.capacity * self.topk * self.weight_size


@dataclass(frozen=True)
class Regions:
    """The ranks' regions for one exchange, as `rank` sees them."""

    addresses: Tensor  # int64 [ranks], where the kernels run
    rank: int
    layout: RegionLayout


def stage(regions: Regions, x: Tensor, experts: Tensor | None = None, weights: Tensor | None = None) -> None:
    """Write this rank's tokens to its region, if the region can hold them.

    x [tokens, width]; experts int32 and weights [tokens, topk]: with them the number of tokens is written too, even if
    the region is too small for the tokens.
    """
    layout, tokens, x = regions.layout, len(x), x.contiguous()
    assert tokens <= layout.capacity or experts is not None
    pieces, blocks = _blocks(layout)
    offsets = layout.weights, layout.rows
    # One program at least writes the number of tokens; where the region is too small, no other one is needed.
    grid = (max(tokens, 1) if tokens <= layout.capacity else 1, pieces)
    _stage[grid](
        x, experts, weights, regions.addresses, regions.rank, tokens, layout.capacity, layout.width, *offsets, **blocks
    )


def place(regions: Regions, local_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of all ranks' tokens for this rank's experts, sorted by expert, rank and token.

    local_experts: number of experts per rank; rank r has the experts from r * local_experts on.
    -> row_map int32 [ranks, capacity, topk], -1 for experts of other ranks; rows per expert int32 [local_experts];
    int32 [2]: number of rows, and the largest number of tokens of a rank.
    """
    layout, device = regions.layout, regions.addresses.device
    row_map = torch.empty(layout.ranks, layout.capacity, layout.topk, dtype=torch.int32, device=device)
    totals, summary = row_map.new_empty(local_experts), row_map.new_empty(2)
    padded = int(triton.next_power_of_2(local_experts))
    step = max(4096 // padded, 1)
    span = step * max(triton.cdiv(layout.capacity, step * max(MAX_PROGRAMS // layout.ranks, 1)), 1)
    programs = max(int(triton.cdiv(layout.capacity, span)), 1)
    counts, choices = row_map.new_empty(layout.ranks * programs, padded), torch.empty_like(row_map)
    sizes: LaunchArgs = {"TOPK": layout.topk, "EXPERTS": padded}
    count_sizes: LaunchArgs = sizes | {"CHOICES": CHOICES}
    fill_sizes: LaunchArgs = sizes | {"STEP": step}
    spans = layout.capacity, span, local_experts
    first = regions.rank * local_experts
    _count[(programs, layout.ranks)](regions.addresses, choices, counts, *spans, first, **count_sizes)
    _fill[(programs, layout.ranks)](
        regions.addresses, choices, counts, row_map, totals, summary, *spans, layout.ranks, **fill_sizes
    )
    return row_map, totals, summary


def pull(regions: Regions, row_map: Tensor, tokens: int, rows: Tensor, row_weights: Tensor | None = None) -> None:
    """Copy the first `tokens` tokens of every rank, and their weights, to their rows.

    row_map: of `place`; rows [any number, width] and row_weights [the same]: tokens placed beyond them are left out.
    """
    layout = regions.layout
    pieces, blocks = _blocks(layout, RANKS=layout.ranks)
    if tokens and len(rows):
        offsets = layout.weights, layout.rows
        _pull[(layout.ranks * tokens, pieces)](
            regions.addresses,
            row_map,
            rows,
            row_weights,
            regions.rank,
            row_map.shape[1],
            len(rows),
            layout.width,
            *offsets,
            **blocks,
        )


def stage_sums(regions: Regions, row_map: Tensor, tokens: int, rows: Tensor, row_weights: Tensor | None = None) -> None:
    """Write to this rank's region the sum of the rows of each token of another rank, and its rows' weights.

    row_map: of `place`; tokens: the largest number of a rank; rows [rows, width], row_weights [rows].
    """
    layout = regions.layout
    assert tokens <= layout.capacity
    pieces, blocks = _blocks(layout, RANKS=layout.ranks)
    if tokens and len(rows) and layout.ranks > 1:
        _stage_sums[((layout.ranks - 1) * tokens, pieces)](
            regions.addresses,
            row_map,
            rows,
            row_weights,
            regions.rank,
            row_map.shape[1],
            layout.capacity,
            layout.width,
            layout.sums,
            **blocks,
        )


def add_sums(
    regions: Regions,
    row_map: Tensor,
    experts: Tensor,
    local_experts: int,
    rows: Tensor,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of the rows of this rank's tokens over all ranks, and their weights.

    row_map: of `place`; experts int32 [tokens, topk]; rows [rows, width] and row_weights [rows]: this rank's rows.
    The sums are made in fp32, in the order of the ranks -> [tokens, width], [tokens, topk].
    """
    layout, tokens = regions.layout, len(experts)
    x = rows.new_empty(tokens, layout.width)
    weights = None if row_weights is None else row_weights.new_empty(tokens, layout.topk)
    pieces, blocks = _blocks(layout, RANK=regions.rank, RANKS=layout.ranks)
    if tokens:
        _add_sums[(tokens, pieces)](
            regions.addresses,
            row_map,
            experts,
            rows,
            row_weights,
            x,
            weights,
            row_map.shape[1],
            layout.capacity,
            layout.width,
            layout.sums,
            local_experts,
            **blocks,
        )
    return x, weights


def _blocks(layout: RegionLayout, **ranks: int) -> tuple[int, LaunchArgs]:
    """Return the number of pieces of a row, and the sizes for the kernels, with `ranks` as further constants."""
    piece = min(int(triton.next_power_of_2(layout.width)), PIECE)
    blocks = {"TOPK": layout.topk, "PADDED": triton.next_power_of_2(layout.topk), "PIECE": piece}
    return int(triton.cdiv(layout.width, piece)), blocks | ranks | {"num_warps": max(piece // 512, 1)}


@triton.jit
def _part(addresses, rank, offset, like):
    """Return a pointer to the part at `offset` of a rank's region, with elements of the type of `like`'s."""
    pointer = (tl.load(addresses + rank) + offset).to(tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(pointer, 16)


@triton.jit(do_not_specialize=["rank", "tokens", "capacity"])
def _stage(
    x,
    experts,
    weights,
    addresses,
    rank,
    tokens,
    capacity,
    width,
    weights_offset,
    rows_offset,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    PIECE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if experts is not None and (token == 0) & (tl.program_id(1) == 0):
        tl.store(_part(addresses, rank, 0, experts), tokens)
    if (token < tokens) & (tokens <= capacity):
        column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        values = tl.load(x + token * width + column, column < width)
        tl.store(_part(addresses, rank, rows_offset, x) + token * width + column, values, column < width)
        if experts is not None and tl.program_id(1) == 0:
            slot = tl.arange(0, PADDED)
            mask = slot < TOPK
            source = token * TOPK + slot
            tl.store(_part(addresses, rank, HEADER, experts) + source, tl.load(experts + source, mask), mask)
            tl.store(_part(addresses, rank, weights_offset, weights) + source, tl.load(weights + source, mask), mask)


@triton.jit(do_not_specialize=["capacity", "span", "first_expert"])
def _count(
    addresses,
    choices,
    counts,
    capacity,
    span,
    local_experts,
    first_expert,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Count the rows of each expert of this rank in a span of a rank's tokens: counts [ranks * programs, EXPERTS].

    choices [ranks, capacity, TOPK]: the number of each chosen expert on this rank, -1 for experts of other ranks.
    """
    source = tl.program_id(1)
    tokens = tl.minimum(tl.load(_part(addresses, source, 0, choices)), capacity)
    experts = _part(addresses, source, HEADER, choices)
    choices += source.to(tl.int64) * capacity * TOPK
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, capacity) * TOPK
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(first * TOPK, last, CHOICES):
        choice = start + tl.arange(0, CHOICES)
        expert = tl.load(experts + choice, choice < tl.minimum(last, tokens * TOPK), other=-1) - first_expert
        is_local = (choice < tl.minimum(last, tokens * TOPK)) & (expert >= 0) & (expert < local_experts)
        tl.store(choices + choice, tl.where(is_local, expert, -1), choice < last)
        total += tl.histogram(tl.where(is_local, expert, 0), EXPERTS, is_local)
    program = source * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts + program * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit(do_not_specialize=["capacity", "span", "ranks"])
def _fill(
    addresses,
    choices,
    counts,
    row_map,
    totals,
    summary,
    capacity,
    span,
    local_experts,
    ranks,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Turn the choices of `_count` into rows."""
    expert = tl.arange(0, EXPERTS)
    this_program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    total, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, programs, STEP):
        program = start + tl.arange(0, STEP)[:, None]
        count = tl.load(counts + program * EXPERTS + expert[None, :], program < programs, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(program < this_program, count, 0), 0)
    if this_program == 0:
        tl.store(totals + expert, total, expert < local_experts)
        tl.store(summary, tl.sum(total, 0))
        most = 0
        for source in range(ranks):
            most = tl.maximum(most, tl.load(_part(addresses, source, 0, row_map)))
        tl.store(summary + 1, most)
    next_row = tl.cumsum(total, 0) - total + before  # each expert's next unused row
    offset = tl.program_id(1).to(tl.int64) * capacity * TOPK
    choices += offset
    row_map += offset
    first = tl.program_id(0) * span
    for start in range(first, first + span, STEP):
        token = start + tl.arange(0, STEP)
        chosen = tl.zeros((STEP, EXPERTS), tl.int32)
        for k in tl.static_range(TOPK):
            choice = tl.load(choices + token * TOPK + k, token < capacity, other=-1)
            chosen += (choice[:, None] == expert[None, :]).to(tl.int32)
        row = next_row[None, :] + tl.cumsum(chosen, 0) - chosen
        for k in tl.static_range(TOPK):
            choice = tl.load(choices + token * TOPK + k, token < capacity, other=-1)
            is_chosen = choice[:, None] == expert[None, :]
            row_id = tl.where(choice < 0, -1, tl.sum(tl.where(is_chosen, row, 0), 1))
            tl.store(row_map + token * TOPK + k, row_id, token < capacity)
            row += is_chosen.to(tl.int32)  # a token that chooses an expert twice has two rows
        next_row += tl.sum(chosen, 0)


@triton.jit(do_not_specialize=["rank", "stride", "limit"])
def _pull(
    addresses,
    row_map,
    rows,
    row_weights,
    rank,
    stride,
    limit,
    width,
    weights_offset,
    rows_offset,
    RANKS: tl.constexpr,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    PIECE: tl.constexpr,
):
    # Neighbouring programs read from different ranks, so that local and remote reads overlap.
    source = (tl.program_id(0) + rank + 1) % RANKS
    token = (tl.program_id(0) // RANKS).to(tl.int64)
    slot = tl.arange(0, PADDED)
    row_map += (source.to(tl.int64) * stride + token) * TOPK
    row = tl.load(row_map + slot, slot < TOPK, other=-1)
    if tl.max(row, 0) >= 0:
        column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        values = tl.load(_part(addresses, source, rows_offset, rows) + token * width + column, column < width)
        for k in tl.static_range(TOPK):
            target = tl.load(row_map + k).to(tl.int64)
            is_kept = (target >= 0) & (target < limit)
            tl.store(rows + target * width + column, values, is_kept & (column < width))
        if row_weights is not None and tl.program_id(1) == 0:
            mask = (row >= 0) & (row < limit)
            weight = tl.load(_part(addresses, source, weights_offset, row_weights) + token * TOPK + slot, mask)
            tl.store(row_weights + row, weight, mask)


@triton.jit
def _row_sum(rows, row_map, width, column, TOPK: tl.constexpr):
    """Return the sum of a token's rows in fp32; row_map: of the token."""
    total = tl.zeros((column.shape[0],), tl.float32)
    for k in tl.static_range(TOPK):
        row = tl.load(row_map + k).to(tl.int64)
        total += tl.load(rows + row * width + column, (row >= 0) & (column < width), other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rank", "stride", "capacity"])
def _stage_sums(
    addresses,
    row_map,
    rows,
    row_weights,
    rank,
    stride,
    capacity,
    width,
    sums_offset,
    RANKS: tl.constexpr,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    PIECE: tl.constexpr,
):
    block = tl.program_id(0) % (RANKS - 1)  # block of this rank's region: the other ranks in order
    source = block + (block >= rank).to(tl.int32)
    token = (tl.program_id(0) // (RANKS - 1)).to(tl.int64)
    slot = tl.arange(0, PADDED)
    row_map += (source.to(tl.int64) * stride + token) * TOPK
    row = tl.load(row_map + slot, slot < TOPK, other=-1)
    if tl.max(row, 0) >= 0:
        column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        target = block.to(tl.int64) * capacity + token
        total = _row_sum(rows, row_map, width, column, TOPK)
        sums = _part(addresses, rank, sums_offset, rows)
        tl.store(sums + target * width + column, total.to(rows.dtype.element_ty), column < width)
        if row_weights is not None and tl.program_id(1) == 0:
            weight = tl.load(row_weights + row, row >= 0)
            tl.store(_part(addresses, rank, 0, row_weights) + target * TOPK + slot, weight, row >= 0)


@triton.jit(do_not_specialize=["stride", "capacity"])
def _add_sums(
    addresses,
    row_map,
    experts,
    rows,
    row_weights,
    x,
    weights,
    stride,
    capacity,
    width,
    sums_offset,
    local_experts,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    PIECE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    slot = tl.arange(0, PADDED)
    row_map += (token + RANK * stride) * TOPK
    home = tl.load(experts + token * TOPK + slot, slot < TOPK, other=0) // local_experts
    home = tl.where(slot < TOPK, home, -1)  # rank of each expert
    total = tl.zeros((PIECE,), tl.float32)
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += _row_sum(rows, row_map, width, column, TOPK)
        else:
            block = RANK - (source < RANK)
            is_there = tl.sum((home == source).to(tl.int32), 0) > 0
            sums = _part(addresses, source, sums_offset, rows) + (token + block * capacity) * width
            total += tl.load(sums + column, is_there & (column < width), other=0.0).to(tl.float32)
    tl.store(x + token * width + column, total.to(x.dtype.element_ty), column < width)
    if row_weights is not None and tl.program_id(1) == 0:
        row = tl.load(row_map + slot, slot < TOPK, other=-1)
        weight = tl.load(row_weights + row, row >= 0, other=0.0)
        for source in tl.static_range(RANKS):
            if source != RANK:
                block = RANK - (source < RANK)
                part = _part(addresses, source, 0, row_weights) + (token + block * capacity) * TOPK
                weight = tl.where(home == source, tl.load(part + slot, home == source, other=0.0), weight)
        tl.store(weights + token * TOPK + slot, weight, slot < TOPK)
