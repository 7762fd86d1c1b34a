"""Permutation of tokens to rows sorted by expert, and back: a row map, and two kernels that are mutual adjoints."""
# Loops at compile time:
# pyright: reportGeneralTypeIssues=false

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

PIECE = 2048  # elements of a row per program
MAX_PROGRAMS = 128  # limit of programs that compute a row map


def sort_map(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the row of each token's experts after sorting by expert, then token, and the rows per expert.

    experts [tokens, topk]: indices below `num_experts`, distinct within a token
    -> row_map int32 [tokens, topk], rows per expert int32 [num_experts]
    """
    tokens, topk = experts.shape
    experts = experts.contiguous()
    row_map = torch.empty_like(experts, dtype=torch.int32)
    if not tokens:
        return row_map, row_map.new_zeros(num_experts)
    padded = int(triton.next_power_of_2(num_experts))
    step = max(4096 // padded, 1)
    span = step * triton.cdiv(tokens, step * MAX_PROGRAMS)
    programs = int(triton.cdiv(tokens, span))
    counts, totals = row_map.new_empty(programs, padded), row_map.new_empty(num_experts)
    sizes: LaunchArgs = {"TOPK": topk, "EXPERTS": padded, "STEP": step}
    _count[(programs,)](experts, counts, tokens, span, **sizes)
    _fill_map[(programs,)](experts, counts, row_map, totals, tokens, span, programs, num_experts, **sizes)
    return row_map, totals


def chunk_sort_map(counts: Tensor, rows: int) -> Tensor:
    """Return the row map that turns rows sorted by source, then expert, into rows sorted by expert, then source.

    counts [sources, experts], with sum `rows` -> int32 [rows, 1], for `permute` and `unpermute`.
    """
    received, sorted_counts = counts.flatten(), counts.t().flatten()
    shifts = (sorted_counts.cumsum(0) - sorted_counts).view(counts.shape[::-1]).t().flatten() - (
        received.cumsum(0) - received
    )
    shifts = shifts.repeat_interleave(received, output_size=rows)  # output_size avoids a wait for the GPU
    return (torch.arange(rows, device=counts.device) + shifts).to(torch.int32).unsqueeze(1)


def permute(x: Tensor, row_map: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Copy each token and its weights to its rows.

    x [tokens, width]; row_map int32 and weights [tokens, topk] -> [tokens * topk, width], [tokens * topk].
    """
    return cast(tuple[Tensor, Tensor], _Permute.apply(x, row_map, weights))


def unpermute(rows: Tensor, row_map: Tensor) -> Tensor:
    """Sum each token's rows in fp32: rows [tokens * topk, width], row_map [tokens, topk] -> [tokens, width]."""
    return cast(Tensor, _Unpermute.apply(rows, row_map))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, row_map: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(row_map)
        permuted_weights = weights.new_empty(row_map.numel())
        return _to_rows(x, row_map, weights.contiguous(), permuted_weights), permuted_weights

    @staticmethod
    def backward(ctx, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (row_map,) = ctx.saved_tensors
        gathered_weights = grad_weights.new_empty(row_map.shape)
        return _to_tokens(grad_rows, row_map, grad_weights.contiguous(), gathered_weights), None, gathered_weights


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, row_map: Tensor) -> Tensor:
        ctx.save_for_backward(row_map)
        return _to_tokens(rows, row_map)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (row_map,) = ctx.saved_tensors
        return _to_rows(grad, row_map), None


def _to_rows(
    x: Tensor, row_map: Tensor, weights: Tensor | None = None, permuted_weights: Tensor | None = None
) -> Tensor:
    rows, x = x.new_empty(row_map.numel(), x.shape[1]), x.contiguous()
    if len(rows):
        grid, blocks = _blocks(row_map, x)
        _permute[grid](x, row_map, weights, rows, permuted_weights, x.shape[1], **blocks)
    return rows


def _to_tokens(
    rows: Tensor, row_map: Tensor, weights: Tensor | None = None, gathered_weights: Tensor | None = None
) -> Tensor:
    x, rows = rows.new_empty(len(row_map), rows.shape[1]), rows.contiguous()
    if len(rows):
        grid, blocks = _blocks(row_map, x)
        _unpermute[grid](rows, row_map, weights, x, gathered_weights, x.shape[1], **blocks)
    return x


def _blocks(row_map: Tensor, x: Tensor) -> tuple[tuple[int, int], LaunchArgs]:
    topk, width = row_map.shape[1], x.shape[1]
    piece = min(int(triton.next_power_of_2(width)), PIECE)
    blocks = {"TOPK": topk, "PADDED": triton.next_power_of_2(topk), "PIECE": piece, "num_warps": max(piece // 512, 1)}
    return (len(x), int(triton.cdiv(width, piece))), blocks


@triton.jit
def _chosen(experts, token, mask, TOPK: tl.constexpr, EXPERTS: tl.constexpr):
    """Count how often each token has chosen each expert (0 or 1), int32 [STEP, EXPERTS]."""
    chosen = tl.zeros((token.shape[0], EXPERTS), tl.int32)
    for k in tl.static_range(TOPK):
        expert = tl.load(experts + token * TOPK + k, mask, other=-1)
        chosen += (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)
    return chosen


@triton.jit(do_not_specialize=["tokens", "span"])
def _count(experts, counts, tokens, span, TOPK: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr):
    """Count how often the `span` tokens of each program choose each expert: counts [programs, EXPERTS]."""
    first = tl.program_id(0) * span
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(first, first + span, STEP):
        token = start + tl.arange(0, STEP)
        total += tl.sum(_chosen(experts, token, token < tokens, TOPK, EXPERTS), 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit(do_not_specialize=["tokens", "span", "programs"])
def _fill_map(
    experts,
    counts,
    row_map,
    totals,
    tokens,
    span,
    programs,
    num_experts,
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
        tl.store(totals + expert, total, expert < num_experts)
    next_row = tl.cumsum(total, 0) - total + before  # each expert's next unused row
    first = tl.program_id(0) * span
    for start in range(first, first + span, STEP):
        token = start + tl.arange(0, STEP)
        chosen = _chosen(experts, token, token < tokens, TOPK, EXPERTS)
        row = next_row[None, :] + tl.cumsum(chosen, 0) - 1
        for k in tl.static_range(TOPK):
            choice = tl.load(experts + token * TOPK + k, token < tokens, other=-1)
            row_id = tl.sum(tl.where(choice[:, None] == expert[None, :], row, 0), 1)
            tl.store(row_map + token * TOPK + k, row_id, token < tokens)
        next_row += tl.sum(chosen, 0)


@triton.jit
def _permute(
    x,
    row_map,
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
    for k in tl.static_range(TOPK):
        row = tl.load(row_map + token * TOPK + k).to(tl.int64)
        tl.store(rows + row * width + column, values, column < width)
    if weights is not None and tl.program_id(1) == 0:
        slot = token * TOPK + tl.arange(0, PADDED)
        mask = tl.arange(0, PADDED) < TOPK
        target = tl.load(row_map + slot, mask, other=0)
        tl.store(permuted_weights + target, tl.load(weights + slot, mask), mask)


@triton.jit
def _unpermute(
    rows,
    row_map,
    weights,
    x,
    gathered_weights,
    width,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    PIECE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    total = tl.zeros((PIECE,), tl.float32)
    for k in tl.static_range(TOPK):
        row = tl.load(row_map + token * TOPK + k).to(tl.int64)
        total += tl.load(rows + row * width + column, column < width, other=0.0).to(tl.float32)
    tl.store(x + token * width + column, total.to(x.dtype.element_ty), column < width)
    if weights is not None and tl.program_id(1) == 0:
        slot = token * TOPK + tl.arange(0, PADDED)
        mask = tl.arange(0, PADDED) < TOPK
        source = tl.load(row_map + slot, mask, other=0)
        tl.store(gathered_weights + slot, tl.load(weights + source, mask), mask)
