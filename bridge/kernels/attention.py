"""Causal attention over packed documents, by FlashAttention-2 (arxiv.org/abs/2307.08691).

There is one forward kernel and two backward kernels. A program handles one tile of one document. `tiles` lists all
tiles, those with the most work first, so that documents of any length fill the device. The query heads of a group share
a key and a value head, whose gradients are summed in a fixed order: within a program over some of the heads, then over
programs.
"""
# Calls of kernels, and functions that return in both branches of an `if` at compile time:
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

BLOCK = 64  # queries, or keys, per tile
# Per kernel: rows of the other side (keys or queries) per iteration, warps, pipeline stages.
FORWARD, QUERY_BACKWARD, KEY_BACKWARD = (64, 4, 3), (64, 4, 2), (32, 4, 3)
WIDE = (32, 8, 1)  # every kernel, for heads wider than 128
HEADS_PER_SPLIT = 2  # query heads per program in the backward pass of keys
LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1e30)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Tensor,
    scale: float,
    window: int | None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, like query, and the log-sum-exp of each query's scores, [heads, tokens] fp32.

    query: [tokens, heads, dim]
    key, value: [keys, groups, dim]
    tiles: [n, 5] int32 of queries: start and number of the document's queries, start and number of its keys, and index
        of the tile's first query in the document. The last query and the last key are the same token
    window: number of keys that a query attends to, including its own
    cap: scores x become cap * tanh(x / cap)
    """
    tokens, heads, dim = query.shape
    output = query.new_empty(tokens, heads, dim)
    log_sum = query.new_empty(heads, tokens, dtype=torch.float32)
    _attend[tiles.shape[0] * heads,](
        query, key, value, output, log_sum, tiles, tokens, scale, window or 0,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        **_constants(query, key, window, cap, *FORWARD),
    )  # fmt: skip
    return output, log_sum


def attend_backward(
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
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. grad: like output; key_tiles: like `tiles`, but of keys."""
    tokens, heads, dim = query.shape
    grad_query = query.new_empty(tokens, heads, dim)
    # A key is attended to by all query heads of its group: many heads are split over programs.
    splits = max(heads // key.shape[1] // HEADS_PER_SPLIT, 1)
    grad_key, grad_value = (
        torch.empty(splits, *x.shape, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
        for x in (key, value)
    )
    delta = torch.empty_like(log_sum)  # sum of output * grad per query, as in FlashAttention-2
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
    _query_backward[tiles.shape[0] * heads,](
        query, key, value, output, grad, log_sum, delta, grad_query, tiles, tokens, scale, window or 0, *strides,
        **_constants(query, key, window, cap, *QUERY_BACKWARD),
    )  # fmt: skip
    _key_backward[key_tiles.shape[0] * key.shape[1] * splits,](
        query, key, value, grad, log_sum, delta, grad_key, grad_value, key_tiles, tokens, len(key), scale, window or 0,
        *strides, SHARES=splits, **_constants(query, key, window, cap, *KEY_BACKWARD),
    )  # fmt: skip
    if splits == 1:
        return grad_query, grad_key[0], grad_value[0]
    return grad_query, grad_key.sum(0).to(key.dtype), grad_value.sum(0).to(value.dtype)


def _constants(
    query: Tensor, key: Tensor, window: int | None, cap: float | None, step: int, warps: int, stages: int
) -> LaunchArgs:
    dim = query.shape[-1]
    if dim > 128:
        step, warps, stages = WIDE
    return {
        "HEADS": query.shape[1],
        "GROUPS": key.shape[1],
        "DIM": dim,
        "WIDTH": max(1 << (dim - 1).bit_length(), 16),
        "WINDOW": window is not None,
        "CAP": cap,
        "BLOCK": BLOCK,
        "STEP": step,
        "num_warps": warps,
        "num_stages": stages,
    }


@triton.jit
def _load_rows(start, row_stride, row, rows, DIM: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr):
    """Load rows `row` from `start`, [row, WIDTH]; if BOUNDED, rows after the last are zeros."""
    dim = tl.arange(0, WIDTH)[None, :]
    at = start + row[:, None] * row_stride + dim
    if BOUNDED or DIM < WIDTH:
        return tl.load(at, mask=(row < rows)[:, None] & (dim < DIM), other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _store_rows(start, row_stride, row, rows, x, DIM: tl.constexpr, WIDTH: tl.constexpr):
    dim = tl.arange(0, WIDTH)[None, :]
    tl.store(start + row[:, None] * row_stride + dim, x.to(start.dtype.element_ty), (row < rows)[:, None] & (dim < DIM))


@triton.jit
def _is_visible(query, key, before, window, WINDOW: tl.constexpr):
    """Return whether a query attends to a key; `before`: the document's keys before the first query."""
    seen = key <= query + before
    if WINDOW:
        seen = seen & (key > query + before - window)
    return seen


@triton.jit
def _scores(rows, columns, scale, CAP: tl.constexpr):
    """Return the scores of rows and columns in base 2, and the derivative of their cap, 1 without one.

    scale: with the factor to base 2.
    """
    score = tl.dot(rows, tl.trans(columns)) * scale
    if CAP is None:
        return score, 1.0
    else:
        bent = 2 * tl.sigmoid(score * (2 / (CAP * LOG2_E))) - 1  # tanh, which Triton's interpreter has not
        return bent * (CAP * LOG2_E), 1 - bent * bent


@triton.jit
def _attend_to_keys(
    acc, top, total, q, key, value, query_row, first, last, keys, before, window, scale, k_token, v_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, STEP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Attend to the keys first..last. WHOLE: every query attends to all of them."""
    for start in range(first, last, STEP):
        row = start + tl.arange(0, STEP)
        k = _load_rows(key, k_token, row, keys, DIM, WIDTH, not WHOLE)
        score, _ = _scores(q, k, scale, CAP)
        if not WHOLE:
            score = tl.where(_is_visible(query_row[:, None], row[None, :], before, window, WINDOW), score, MASKED)
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        less = tl.exp2(top - higher)
        total = total * less + tl.sum(share, 1)
        v = _load_rows(value, v_token, row, keys, DIM, WIDTH, not WHOLE)
        acc = tl.dot(share.to(v.dtype), v, acc * less[:, None])
        top = higher
    return acc, top, total


# Not specialized: rows of other lengths must not compile the kernels anew, which takes as long as a training step.
@triton.jit(do_not_specialize=["tokens"])
def _attend(
    query, key, value, output, log_sum, tiles, tokens, scale, window, q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, tiles = program % HEADS, tiles + program // HEADS * 5
    group = head // (HEADS // GROUPS)
    q_start, queries = tl.load(tiles).to(tl.int64), tl.load(tiles + 1)
    k_start, keys, first = tl.load(tiles + 2).to(tl.int64), tl.load(tiles + 3), tl.load(tiles + 4)
    before = keys - queries
    row = first + tl.arange(0, BLOCK)
    q = _load_rows(query + q_start * q_token + head * q_head, q_token, row, queries, DIM, WIDTH, True)
    key += k_start * k_token + group * k_head
    value += k_start * v_token + group * v_head
    scale = scale * LOG2_E
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    top, total = tl.full([BLOCK], MASKED, tl.float32), tl.zeros([BLOCK], tl.float32)
    low, masked, high = _key_range(first, before, queries, window, WINDOW, BLOCK, STEP)
    acc, top, total = _attend_to_keys(
        acc, top, total, q, key, value, row, low, masked, keys, before, window, scale, k_token, v_token,
        DIM, WIDTH, WINDOW, CAP, STEP, True,
    )  # fmt: skip
    acc, top, total = _attend_to_keys(
        acc, top, total, q, key, value, row, masked, high, keys, before, window, scale, k_token, v_token,
        DIM, WIDTH, WINDOW, CAP, STEP, False,
    )  # fmt: skip
    target = output + (q_start * HEADS + head) * DIM
    _store_rows(target, HEADS * DIM, row, queries, acc / total[:, None], DIM, WIDTH)
    tl.store(log_sum + head.to(tl.int64) * tokens + q_start + row, (top + tl.log2(total)) / LOG2_E, row < queries)


@triton.jit
def _key_range(first, before, queries, window, WINDOW: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Return a tile's first key, its first key that needs a mask, and the end of its keys."""
    high = tl.minimum(first + BLOCK, queries) + before
    if WINDOW:
        low = tl.maximum(first + before - window + 1, 0) // STEP * STEP
        return low, low, high
    else:
        return 0, (first + before + 1) // STEP * STEP, high


@triton.jit
def _query_gradient(
    acc, q, grad, log_sum, delta, key, value, query_row, first, last, keys, before, window, scale, k_token, v_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, STEP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, STEP):
        row = start + tl.arange(0, STEP)
        k = _load_rows(key, k_token, row, keys, DIM, WIDTH, not WHOLE)
        v = _load_rows(value, v_token, row, keys, DIM, WIDTH, not WHOLE)
        score, slope = _scores(q, k, scale, CAP)
        share = tl.exp2(score - log_sum[:, None])
        if not WHOLE:
            share = tl.where(_is_visible(query_row[:, None], row[None, :], before, window, WINDOW), share, 0.0)
        grad_score = share * (tl.dot(grad, tl.trans(v)) - delta[:, None]) * slope
        acc = tl.dot(grad_score.to(k.dtype), k, acc)
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _query_backward(
    query, key, value, output, grad, log_sum, delta, grad_query, tiles, tokens, scale, window,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head, tiles = program % HEADS, tiles + program // HEADS * 5
    group = head // (HEADS // GROUPS)
    q_start, queries = tl.load(tiles).to(tl.int64), tl.load(tiles + 1)
    k_start, keys, first = tl.load(tiles + 2).to(tl.int64), tl.load(tiles + 3), tl.load(tiles + 4)
    before = keys - queries
    row = first + tl.arange(0, BLOCK)
    at = (q_start * HEADS + head) * DIM
    out = _load_rows(output + at, HEADS * DIM, row, queries, DIM, WIDTH, True).to(tl.float32)
    d = _load_rows(grad + at, HEADS * DIM, row, queries, DIM, WIDTH, True)
    sums = head.to(tl.int64) * tokens + q_start + row
    row_delta = tl.sum(out * d.to(tl.float32), 1)
    tl.store(delta + sums, row_delta, row < queries)
    logs = tl.load(log_sum + sums, mask=row < queries, other=0.0) * LOG2_E
    q = _load_rows(query + q_start * q_token + head * q_head, q_token, row, queries, DIM, WIDTH, True)
    key += k_start * k_token + group * k_head
    value += k_start * v_token + group * v_head
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    low, masked, high = _key_range(first, before, queries, window, WINDOW, BLOCK, STEP)
    acc = _query_gradient(
        acc, q, d, logs, row_delta, key, value, row, low, masked, keys, before, window, scale * LOG2_E,
        k_token, v_token, DIM, WIDTH, WINDOW, CAP, STEP, True,
    )  # fmt: skip
    acc = _query_gradient(
        acc, q, d, logs, row_delta, key, value, row, masked, high, keys, before, window, scale * LOG2_E,
        k_token, v_token, DIM, WIDTH, WINDOW, CAP, STEP, False,
    )  # fmt: skip
    _store_rows(grad_query + at, HEADS * DIM, row, queries, acc * scale, DIM, WIDTH)


@triton.jit(do_not_specialize=["tokens", "all_keys"])
def _key_backward(
    query, key, value, grad, log_sum, delta, grad_key, grad_value, tiles, tokens, all_keys, scale, window,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    share, group = program % SHARES, program // SHARES % GROUPS
    tiles += program // (SHARES * GROUPS) * 5
    q_start, queries = tl.load(tiles).to(tl.int64), tl.load(tiles + 1)
    k_start, keys, first = tl.load(tiles + 2).to(tl.int64), tl.load(tiles + 3), tl.load(tiles + 4)
    before = keys - queries
    row = first + tl.arange(0, BLOCK)
    k = _load_rows(key + k_start * k_token + group * k_head, k_token, row, keys, DIM, WIDTH, True)
    v = _load_rows(value + k_start * v_token + group * v_head, v_token, row, keys, DIM, WIDTH, True)
    grad_k, grad_v = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
    low, high = tl.maximum(first - before, 0), queries
    if WINDOW:
        high = tl.minimum(queries, tl.maximum(first + BLOCK - 1 + window - before, low))
    steps = (high - low + STEP - 1) // STEP
    SPLIT_HEADS: tl.constexpr = HEADS // GROUPS // SHARES
    # Iterate over this program's query heads of the group.
    for step in range(steps * SPLIT_HEADS):
        head = (group * SHARES + share) * SPLIT_HEADS + step // steps
        query_row = low + step % steps * STEP + tl.arange(0, STEP)
        q = _load_rows(query + q_start * q_token + head * q_head, q_token, query_row, queries, DIM, WIDTH, True)
        d = _load_rows(grad + (q_start * HEADS + head) * DIM, HEADS * DIM, query_row, queries, DIM, WIDTH, True)
        sums = head.to(tl.int64) * tokens + q_start + query_row
        logs = tl.load(log_sum + sums, mask=query_row < queries, other=0.0) * LOG2_E
        row_delta = tl.load(delta + sums, mask=query_row < queries, other=0.0)
        score, slope = _scores(k, q, scale * LOG2_E, CAP)
        part = tl.exp2(score - logs[None, :])
        part = tl.where(_is_visible(query_row[None, :], row[:, None], before, window, WINDOW), part, 0.0)
        grad_v = tl.dot(part.to(d.dtype), d, grad_v)
        grad_score = part * (tl.dot(v, tl.trans(d)) - row_delta[None, :]) * slope
        grad_k = tl.dot(grad_score.to(q.dtype), q, grad_k)
    at = ((share.to(tl.int64) * all_keys + k_start) * GROUPS + group) * DIM
    _store_rows(grad_key + at, GROUPS * DIM, row, keys, grad_k * scale, DIM, WIDTH)
    _store_rows(grad_value + at, GROUPS * DIM, row, keys, grad_v, DIM, WIDTH)
