"""Causal attention over documents, in one kernel forward and two back (FlashAttention-2, arxiv.org/abs/2307.08691).

A program has one tile of one document: `tiles` lists those there are, the longest work first, so that documents of any
length fill the device. Key and value heads are shared by a group's query heads: their gradients are summed in a fixed
order, by a program over some of the heads, then over programs.
"""
# Calls of kernels, and functions that return in both branches of an `if` at compile time:
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

BLOCK = 64  # queries, or keys, of a tile
# Forward, and back to queries and to keys: of the other side at a time; warps; stages of loads in flight.
FORWARD, TO_QUERIES, TO_KEYS = (64, 4, 3), (64, 4, 2), (32, 4, 3)
SHARED_HEADS = 2  # query heads that a program goes through for its keys
LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1e30)


def attend(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """query [tokens, heads, dim], key and value [keys, groups, dim] -> output like query, and the logarithm of each
    query's sum of exp(score), [heads, tokens] fp32.

    tiles [n, 5] int32 of queries: where the document's queries begin, how many they are, where its keys begin, how many
    they are, and the tile's first query among the document's. The last query meets the last key. window: a query meets
    so many keys, its own with them.
    """
    tokens, heads, dim = query.shape
    output = query.new_empty(tokens, heads, dim)
    log_sum = query.new_empty(heads, tokens, dtype=torch.float32)
    _attend[tiles.shape[0] * heads,](
        query, key, value, output, log_sum, tiles, tokens, scale, window or 0,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], **_constants(query, key, window, *FORWARD),
    )  # fmt: skip
    return output, log_sum


def attend_back(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    tiles: Tensor,
    key_tiles: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. grad like output; key_tiles as `tiles`, of keys."""
    tokens, heads, dim = query.shape
    grad_query = query.new_empty(tokens, heads, dim)
    # A key meets the queries of several heads: where they are many, programs share them out.
    shares = max(heads // key.shape[1] // SHARED_HEADS, 1)
    grad_key, grad_value = (
        torch.empty(shares, *x.shape, dtype=x.dtype if shares == 1 else torch.float32, device=x.device)
        for x in (key, value)
    )
    along = torch.empty_like(log_sum)  # each query's sum of output * grad
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
    _back_to_queries[tiles.shape[0] * heads,](
        query, key, value, output, grad, log_sum, along, grad_query, tiles, tokens, scale, window or 0, *strides,
        **_constants(query, key, window, *TO_QUERIES),
    )  # fmt: skip
    _back_to_keys[key_tiles.shape[0] * key.shape[1] * shares,](
        query, key, value, grad, log_sum, along, grad_key, grad_value, key_tiles, tokens, len(key), scale, window or 0,
        *strides, SHARES=shares, **_constants(query, key, window, *TO_KEYS),
    )  # fmt: skip
    if shares == 1:
        return grad_query, grad_key[0], grad_value[0]
    return grad_query, grad_key.sum(0).to(key.dtype), grad_value.sum(0).to(value.dtype)


def _constants(query: Tensor, key: Tensor, window: int | None, step: int, warps: int, stages: int) -> LaunchArgs:
    dim = query.shape[-1]
    return {
        "HEADS": query.shape[1],
        "GROUPS": key.shape[1],
        "DIM": dim,
        "WIDTH": max(1 << (dim - 1).bit_length(), 16),
        "WINDOW": window is not None,
        "BLOCK": BLOCK,
        "STEP": step,
        "num_warps": warps,
        "num_stages": stages,
    }


@triton.jit
def _rows(start, of_row, row, rows, DIM: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows `row` of those at `start`, [row, WIDTH]; where BOUNDED, rows behind the last are zeros."""
    dim = tl.arange(0, WIDTH)[None, :]
    at = start + row[:, None] * of_row + dim
    if BOUNDED or DIM < WIDTH:
        return tl.load(at, mask=(row < rows)[:, None] & (dim < DIM), other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _put(start, of_row, row, rows, x, DIM: tl.constexpr, WIDTH: tl.constexpr):
    dim = tl.arange(0, WIDTH)[None, :]
    tl.store(start + row[:, None] * of_row + dim, x.to(start.dtype.element_ty), (row < rows)[:, None] & (dim < DIM))


@triton.jit
def _seen(query, key, before, window, WINDOW: tl.constexpr):
    """Return whether a query attends to a key; `before`: the document's keys before the first query."""
    seen = key <= query + before
    if WINDOW:
        seen = seen & (key > query + before - window)
    return seen


@triton.jit
def _over_keys(
    acc, top, total, q, key, value, query_row, first, last, keys, before, window, scale, k_token, v_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Keys first to last; WHOLE: every query meets all of them."""
    for start in range(first, last, STEP):
        row = start + tl.arange(0, STEP)
        k = _rows(key, k_token, row, keys, DIM, WIDTH, not WHOLE)
        score = tl.dot(q, tl.trans(k)) * scale
        if not WHOLE:
            score = tl.where(_seen(query_row[:, None], row[None, :], before, window, WINDOW), score, MASKED)
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        less = tl.exp2(top - higher)
        total = total * less + tl.sum(share, 1)
        v = _rows(value, v_token, row, keys, DIM, WIDTH, not WHOLE)
        acc = tl.dot(share.to(v.dtype), v, acc * less[:, None])
        top = higher
    return acc, top, total


@triton.jit
def _attend(
    query, key, value, output, log_sum, tiles, tokens, scale, window, q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, tiles = program % HEADS, tiles + program // HEADS * 5
    group = head // (HEADS // GROUPS)
    q_start, queries = tl.load(tiles).to(tl.int64), tl.load(tiles + 1)
    k_start, keys, first = tl.load(tiles + 2).to(tl.int64), tl.load(tiles + 3), tl.load(tiles + 4)
    before = keys - queries
    row = first + tl.arange(0, BLOCK)
    q = _rows(query + q_start * q_token + head * q_head, q_token, row, queries, DIM, WIDTH, True)
    key += k_start * k_token + group * k_head
    value += k_start * v_token + group * v_head
    scale = scale * LOG2_E
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    top, total = tl.full([BLOCK], MASKED, tl.float32), tl.zeros([BLOCK], tl.float32)
    low, masked, high = _reach(first, before, queries, window, WINDOW, BLOCK, STEP)
    acc, top, total = _over_keys(
        acc, top, total, q, key, value, row, low, masked, keys, before, window, scale, k_token, v_token,
        DIM, WIDTH, WINDOW, STEP, True,
    )  # fmt: skip
    acc, top, total = _over_keys(
        acc, top, total, q, key, value, row, masked, high, keys, before, window, scale, k_token, v_token,
        DIM, WIDTH, WINDOW, STEP, False,
    )  # fmt: skip
    into = output + (q_start * HEADS + head) * DIM
    _put(into, HEADS * DIM, row, queries, acc / total[:, None], DIM, WIDTH)
    tl.store(log_sum + head.to(tl.int64) * tokens + q_start + row, (top + tl.log2(total)) / LOG2_E, row < queries)


@triton.jit
def _reach(first, before, queries, window, WINDOW: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The first key that a tile's queries meet, the first that not all of them may meet, and behind the last."""
    high = tl.minimum(first + BLOCK, queries) + before
    if WINDOW:
        low = tl.maximum(first + before - window + 1, 0) // STEP * STEP
        return low, low, high
    else:
        return 0, (first + before + 1) // STEP * STEP, high


@triton.jit
def _grad_over_keys(
    acc, q, grad, log_sum, along, key, value, query_row, first, last, keys, before, window, scale, k_token, v_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, STEP):
        row = start + tl.arange(0, STEP)
        k = _rows(key, k_token, row, keys, DIM, WIDTH, not WHOLE)
        v = _rows(value, v_token, row, keys, DIM, WIDTH, not WHOLE)
        share = tl.exp2(tl.dot(q, tl.trans(k)) * scale - log_sum[:, None])
        if not WHOLE:
            share = tl.where(_seen(query_row[:, None], row[None, :], before, window, WINDOW), share, 0.0)
        of_score = share * (tl.dot(grad, tl.trans(v)) - along[:, None])
        acc = tl.dot(of_score.to(k.dtype), k, acc)
    return acc


@triton.jit
def _back_to_queries(
    query, key, value, output, grad, log_sum, along, grad_query, tiles, tokens, scale, window,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, tiles = program % HEADS, tiles + program // HEADS * 5
    group = head // (HEADS // GROUPS)
    q_start, queries = tl.load(tiles).to(tl.int64), tl.load(tiles + 1)
    k_start, keys, first = tl.load(tiles + 2).to(tl.int64), tl.load(tiles + 3), tl.load(tiles + 4)
    before = keys - queries
    row = first + tl.arange(0, BLOCK)
    at = (q_start * HEADS + head) * DIM
    done = _rows(output + at, HEADS * DIM, row, queries, DIM, WIDTH, True).to(tl.float32)
    d = _rows(grad + at, HEADS * DIM, row, queries, DIM, WIDTH, True)
    sums = head.to(tl.int64) * tokens + q_start + row
    of_row = tl.sum(done * d.to(tl.float32), 1)
    tl.store(along + sums, of_row, row < queries)
    logs = tl.load(log_sum + sums, mask=row < queries, other=0.0) * LOG2_E
    q = _rows(query + q_start * q_token + head * q_head, q_token, row, queries, DIM, WIDTH, True)
    key += k_start * k_token + group * k_head
    value += k_start * v_token + group * v_head
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    low, masked, high = _reach(first, before, queries, window, WINDOW, BLOCK, STEP)
    acc = _grad_over_keys(
        acc, q, d, logs, of_row, key, value, row, low, masked, keys, before, window, scale * LOG2_E, k_token, v_token,
        DIM, WIDTH, WINDOW, STEP, True,
    )  # fmt: skip
    acc = _grad_over_keys(
        acc, q, d, logs, of_row, key, value, row, masked, high, keys, before, window, scale * LOG2_E, k_token, v_token,
        DIM, WIDTH, WINDOW, STEP, False,
    )  # fmt: skip
    _put(grad_query + at, HEADS * DIM, row, queries, acc * scale, DIM, WIDTH)


@triton.jit
def _back_to_keys(
    query, key, value, grad, log_sum, along, grad_key, grad_value, tiles, tokens, all_keys, scale, window,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    share, group = program % SHARES, program // SHARES % GROUPS
    tiles += program // (SHARES * GROUPS) * 5
    q_start, queries = tl.load(tiles).to(tl.int64), tl.load(tiles + 1)
    k_start, keys, first = tl.load(tiles + 2).to(tl.int64), tl.load(tiles + 3), tl.load(tiles + 4)
    before = keys - queries
    row = first + tl.arange(0, BLOCK)
    k = _rows(key + k_start * k_token + group * k_head, k_token, row, keys, DIM, WIDTH, True)
    v = _rows(value + k_start * v_token + group * v_head, v_token, row, keys, DIM, WIDTH, True)
    of_key, of_value = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
    low, high = tl.maximum(first - before, 0), queries
    if WINDOW:
        high = tl.minimum(queries, tl.maximum(first + BLOCK - 1 + window - before, low))
    steps = (high - low + STEP - 1) // STEP
    OWN: tl.constexpr = HEADS // GROUPS // SHARES
    # This program's query heads of the group, one after another.
    for step in range(steps * OWN):
        head = (group * SHARES + share) * OWN + step // steps
        query_row = low + step % steps * STEP + tl.arange(0, STEP)
        q = _rows(query + q_start * q_token + head * q_head, q_token, query_row, queries, DIM, WIDTH, True)
        d = _rows(grad + (q_start * HEADS + head) * DIM, HEADS * DIM, query_row, queries, DIM, WIDTH, True)
        sums = head.to(tl.int64) * tokens + q_start + query_row
        logs = tl.load(log_sum + sums, mask=query_row < queries, other=0.0) * LOG2_E
        of_row = tl.load(along + sums, mask=query_row < queries, other=0.0)
        part = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * LOG2_E) - logs[None, :])
        part = tl.where(_seen(query_row[None, :], row[:, None], before, window, WINDOW), part, 0.0)
        of_value = tl.dot(part.to(d.dtype), d, of_value)
        of_score = part * (tl.dot(v, tl.trans(d)) - of_row[None, :])
        of_key = tl.dot(of_score.to(q.dtype), q, of_key)
    at = ((share.to(tl.int64) * all_keys + k_start) * GROUPS + group) * DIM
    _put(grad_key + at, GROUPS * DIM, row, keys, of_key * scale, DIM, WIDTH)
    _put(grad_value + at, GROUPS * DIM, row, keys, of_value, DIM, WIDTH)
