"""Tokens to the rows of their experts and back: a table of places, and two kernels that are each other's adjoint."""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

PIECE = 2048  # elements of a row that a program has
PLACERS = 128  # programs that make a table, at most


def sort_map(experts: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the row of each of a token's experts once rows are sorted by expert, then by token.

    experts [tokens, topk]: numbers below `number`, distinct within a token -> places int32 [tokens, topk]; how many
    rows each expert has, int32 [number].
    """
    tokens, topk = experts.shape
    experts = experts.contiguous()
    places = torch.empty_like(experts, dtype=torch.int32)
    if not tokens:
        return places, places.new_zeros(number)
    padded = int(triton.next_power_of_2(number))
    step = max(4096 // padded, 1)
    span = step * triton.cdiv(tokens, step * PLACERS)
    programs = int(triton.cdiv(tokens, span))
    counts, totals = places.new_empty(programs, padded), places.new_empty(number)
    sizes: LaunchArgs = {"TOPK": topk, "EXPERTS": padded, "STEP": step}
    _count[(programs,)](experts, counts, tokens, span, **sizes)
    _place[(programs,)](experts, counts, places, totals, tokens, span, programs, number, **sizes)
    return places, totals


def chunk_sort_map(counts: Tensor, rows: int) -> Tensor:
    """Return the destination of rows sorted by source, then expert, when sorted by expert, then source.

    counts [sources, experts], `rows` in all -> int32 [rows, 1], as `permute` and `unpermute` take it.
    """
    comes, goes = counts.flatten(), counts.t().flatten()
    shifts = (goes.cumsum(0) - goes).view(counts.shape[::-1]).t().flatten() - (comes.cumsum(0) - comes)
    shifts = shifts.repeat_interleave(comes, output_size=rows)  # whose size is given: nothing waits for the GPU
    return (torch.arange(rows, device=counts.device) + shifts).to(torch.int32).unsqueeze(1)


def permute(x: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's row, and its weights, at its places.

    x [tokens, width]; places int32 and weights [tokens, topk] -> [tokens * topk, width], [tokens * topk].
    """
    return cast(tuple[Tensor, Tensor], _Permute.apply(x, places, weights))


def unpermute(rows: Tensor, places: Tensor) -> Tensor:
    """Sum each token's rows in fp32: rows [tokens * topk, width], places [tokens, topk] -> [tokens, width]."""
    return cast(Tensor, _Unpermute.apply(rows, places))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places)
        permuted_weights = weights.new_empty(places.numel())
        return _to_rows(x, places, weights.contiguous(), permuted_weights), permuted_weights

    @staticmethod
    def backward(ctx, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places,) = ctx.saved_tensors
        collected = grad_weights.new_empty(places.shape)
        return _to_tokens(grad_rows, places, grad_weights.contiguous(), collected), None, collected


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return _to_tokens(rows, places)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (places,) = ctx.saved_tensors
        return _to_rows(grad, places), None


def _to_rows(
    x: Tensor, places: Tensor, weights: Tensor | None = None, permuted_weights: Tensor | None = None
) -> Tensor:
    rows, x = x.new_empty(places.numel(), x.shape[1]), x.contiguous()
    if len(rows):
        grid, blocks = _blocks(places, x)
        _permute[grid](x, places, weights, rows, permuted_weights, x.shape[1], **blocks)
    return rows


def _to_tokens(rows: Tensor, places: Tensor, weights: Tensor | None = None, collected: Tensor | None = None) -> Tensor:
    x, rows = rows.new_empty(len(places), rows.shape[1]), rows.contiguous()
    if len(rows):
        grid, blocks = _blocks(places, x)
        _unpermute[grid](rows, places, weights, x, collected, x.shape[1], **blocks)
    return x


def _blocks(places: Tensor, x: Tensor) -> tuple[tuple[int, int], LaunchArgs]:
    topk, width = places.shape[1], x.shape[1]
    piece = min(int(triton.next_power_of_2(width)), PIECE)
    blocks = {"TOPK": topk, "PADDED": triton.next_power_of_2(topk), "PIECE": piece, "num_warps": max(piece // 512, 1)}
    return (len(x), int(triton.cdiv(width, piece))), blocks


@triton.jit
def _chosen(experts, token, there, TOPK: tl.constexpr, EXPERTS: tl.constexpr):
    """Count how often each token has chosen each expert (0 or 1), int32 [STEP, EXPERTS]."""
    chosen = tl.zeros((token.shape[0], EXPERTS), tl.int32)
    for k in tl.static_range(TOPK):
        expert = tl.load(experts + token * TOPK + k, there, other=-1)
        chosen += (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)
    return chosen


@triton.jit(do_not_specialize=["tokens", "span"])
def _count(experts, counts, tokens, span, TOPK: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr):
    """counts [programs, EXPERTS]: how often each expert is chosen by the `span` tokens of each program."""
    first = tl.program_id(0) * span
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(first, first + span, STEP):
        token = start + tl.arange(0, STEP)
        total += tl.sum(_chosen(experts, token, token < tokens, TOPK, EXPERTS), 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit(do_not_specialize=["tokens", "span", "programs"])
def _place(
    experts,
    counts,
    places,
    totals,
    tokens,
    span,
    programs,
    number,
    TOPK: tl.constexpr,
    EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    total, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, programs, STEP):
        program = start + tl.arange(0, STEP)[:, None]
        count = tl.load(counts + program * EXPERTS + expert[None, :], program < programs, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(program < tl.program_id(0), count, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(totals + expert, total, expert < number)
    free = tl.cumsum(total, 0) - total + before  # each expert's first row that is not taken yet
    first = tl.program_id(0) * span
    for start in range(first, first + span, STEP):
        token = start + tl.arange(0, STEP)
        chosen = _chosen(experts, token, token < tokens, TOPK, EXPERTS)
        row = free[None, :] + tl.cumsum(chosen, 0) - 1
        for k in tl.static_range(TOPK):
            choice = tl.load(experts + token * TOPK + k, token < tokens, other=-1)
            taken = tl.sum(tl.where(choice[:, None] == expert[None, :], row, 0), 1)
            tl.store(places + token * TOPK + k, taken, token < tokens)
        free += tl.sum(chosen, 0)


@triton.jit
def _permute(
    x,
    places,
    weights,
    rows,
    permuted_weights,
    width,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    PIECE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    values = tl.load(x + token * width + column, column < width)
    for k in tl.static_range(TOPK):  # pyright: ignore[reportGeneralTypeIssues]
        row = tl.load(places + token * TOPK + k).to(tl.int64)
        tl.store(rows + row * width + column, values, column < width)
    if weights is not None and tl.program_id(1) == 0:
        slot = token * TOPK + tl.arange(0, PADDED)
        there = tl.arange(0, PADDED) < TOPK
        target = tl.load(places + slot, there, other=0)
        tl.store(permuted_weights + target, tl.load(weights + slot, there), there)


@triton.jit
def _unpermute(
    rows,
    places,
    weights,
    x,
    collected,
    width,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    PIECE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    total = tl.zeros((PIECE,), tl.float32)
    for k in tl.static_range(TOPK):  # pyright: ignore[reportGeneralTypeIssues]
        row = tl.load(places + token * TOPK + k).to(tl.int64)
        total += tl.load(rows + row * width + column, column < width, other=0.0).to(tl.float32)
    tl.store(x + token * width + column, total.to(x.dtype.element_ty), column < width)
    if weights is not None and tl.program_id(1) == 0:
        slot = token * TOPK + tl.arange(0, PADDED)
        there = tl.arange(0, PADDED) < TOPK
        source = tl.load(places + slot, there, other=0)
        tl.store(collected + slot, tl.load(weights + source, there), there)
