"""Queries, keys and values on their way to attention: split, normed and turned in one kernel, and back in another.

A query group's heads lie side by side in what the matrix gives, [queries..., (gates...,) key, value]. A program has a
few tokens of one group, and takes each head as its planes: the two dimensions of a plane turn together. Beside the
gradients the backward pass needs the matrix's output only, so a value can be a view of that.
"""
# Calls of kernels, and functions that return in both branches of an `if` at compile time:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

# Planes that a program has in hand at a time, and its warps: 16 bytes of bf16 a thread forward. Backward more is kept.
SPLIT, JOIN = (1024, 4), (512, 4)
PROGRAMS = 2048  # about so many in a backward pass: each sums up its tokens' shares of the norms' gradients


@dataclass(frozen=True)
class Heads:
    """Layout of the heads in a token's row, and their norms and rotation."""

    groups: int
    queries: int  # of a group
    dim: int  # even
    gated: bool = False  # as many gates as queries come after them
    eps: float = 0.0
    zero_centred: bool = False  # the norms' weights are 1 + what is stored
    interleaved: bool = False  # a plane is two neighbouring dimensions; else one of each half of those that turn
    view_value: bool = False  # the value is a view of the input, not a copy


def split_heads(
    mixed: Tensor, norms: tuple[Tensor, Tensor] | None, rotary: tuple[Tensor, Tensor] | None, heads: Heads
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query and gate [sequence, batch, groups * queries, dim], key and value [sequence, batch, groups, dim], in the
    order query, key, value, gate.

    mixed [sequence, batch, groups * (queries (+ gates) + 2) * dim]; norms: the weights [dim] of the queries' and of the
    keys' RMSNorm; turns: cos and sin [sequence, batch, planes] fp32 of the first 2 * planes dimensions.
    """
    outputs = _SplitHeads.apply(mixed.contiguous(), *(norms or (None, None)), *(rotary or (None, None)), heads)
    query, key, value, gate = outputs  # type: ignore[misc]
    return query, key, value, None if gate is None else gate.flatten(2, 3)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        mixed: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: Heads,
    ):
        sequence, batch, _ = mixed.shape
        grouped = mixed.view(sequence, batch, heads.groups, -1, heads.dim)
        query = mixed.new_empty(sequence, batch, heads.groups * heads.queries, heads.dim)
        key = mixed.new_empty(sequence, batch, heads.groups, heads.dim)
        value = grouped[..., -1, :] if heads.view_value else torch.empty_like(key)
        gate = grouped[..., heads.queries : 2 * heads.queries, :] if heads.gated else None
        grid, constants = _launch(heads, sequence * batch, q_weight, cos, *SPLIT)
        _split[grid](
            mixed, query, key, value, q_weight, k_weight, cos, sin, sequence * batch, batch, *_strides(cos), heads.eps,
            COPY=not heads.view_value, **constants,
        )  # fmt: skip
        ctx.save_for_backward(None if q_weight is None else mixed, q_weight, k_weight, cos, sin)
        ctx.shape, ctx.heads = mixed.shape, heads
        return query, key, value, gate

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        mixed, q_weight, k_weight, cos, sin = ctx.saved_tensors
        heads: Heads = ctx.heads
        sequence, batch, _ = ctx.shape
        query, key, value, gate = (None if grad is None else _by_token(grad) for grad in grads)
        assert query is not None
        grad_mixed = query.new_empty(ctx.shape)
        (tiles, groups), constants = _launch(heads, sequence * batch, q_weight, cos, *JOIN)
        programs = min(tiles, -(-PROGRAMS // groups))
        sums = None
        if any(ctx.needs_input_grad[1:3]):
            sums = query.new_empty(programs * groups, 2, heads.dim, dtype=torch.float32)
        strides = [stride for x in (query, key, value, gate) for stride in ((0, 0) if x is None else x.stride()[:2])]
        _join[programs, groups](
            query, key, value, gate, mixed, grad_mixed, sums, q_weight, k_weight, cos, sin, sequence * batch, tiles,
            batch, *strides, *_strides(cos), heads.eps, **constants,
        )  # fmt: skip
        if sums is None:
            return grad_mixed, None, None, None, None, None
        of_query, of_key = sums.sum(0)
        return grad_mixed, of_query.to(q_weight.dtype), of_key.to(k_weight.dtype), None, None, None


def _by_token(grad: Tensor) -> Tensor:
    """[tokens, heads, dim] of [sequence, batch, heads, dim] or, for gates, [sequence, batch, groups, queries, dim]."""
    grad = grad.flatten(0, 1).flatten(1, -2)
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _strides(cos: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if cos is None else cos.stride()


def _launch(
    heads: Heads, tokens: int, weight: Tensor | None, cos: Tensor | None, tile: int, warps: int
) -> tuple[tuple[int, int], LaunchArgs]:
    """Return the grid, and what the kernels are compiled for."""
    planes = 1 << (heads.dim // 2 - 1).bit_length()
    block = max(tile // planes, 1)
    constants = {
        "GROUPS": heads.groups,
        "QUERIES": heads.queries,
        "DIM": heads.dim,
        "TURNING": 0 if cos is None else cos.shape[-1],
        "GATED": heads.gated,
        "INTERLEAVED": heads.interleaved,
        "NORM": weight is not None,
        "ZERO_CENTRED": heads.zero_centred,
        "PLANES": planes,
        "BLOCK": block,
        "num_warps": warps,
    }
    return (-(-tokens // block), heads.groups), constants


@triton.jit
def _places(DIM: tl.constexpr, TURNING: tl.constexpr, PLANES: tl.constexpr):
    """The two dimensions of each plane, [1, PLANES]; those that do not turn are paired too."""
    plane = tl.arange(0, PLANES)[None, :]
    if 2 * TURNING == DIM or TURNING == 0:
        return plane, plane + DIM // 2
    else:
        turning = plane < TURNING
        return tl.where(turning, plane, plane + TURNING), tl.where(turning, plane + TURNING, plane + DIM // 2)


@triton.jit
def _load(
    start, of_row, row, here,
    DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Both dimensions of each plane of the heads at `start`, one in each row: [ROWS, PLANES] twice."""
    if INTERLEAVED:
        at = tl.arange(0, 2 * PLANES)[None, :]
        head = tl.load(start + row * of_row + at, mask=here & (at < DIM), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(head, [ROWS, PLANES, 2]))
    else:
        first, second = _places(DIM, TURNING, PLANES)
        inside = here & (tl.arange(0, PLANES)[None, :] < DIM // 2)
        one = tl.load(start + row * of_row + first, mask=inside, other=0.0).to(tl.float32)
        return one, tl.load(start + row * of_row + second, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(
    start, of_row, row, here, one, two,
    DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        at = tl.arange(0, 2 * PLANES)[None, :]
        head = tl.reshape(tl.join(one, two), [ROWS, 2 * PLANES])
        tl.store(start + row * of_row + at, head.to(start.dtype.element_ty), mask=here & (at < DIM))
    else:
        first, second = _places(DIM, TURNING, PLANES)
        inside = here & (tl.arange(0, PLANES)[None, :] < DIM // 2)
        tl.store(start + row * of_row + first, one.to(start.dtype.element_ty), mask=inside)
        tl.store(start + row * of_row + second, two.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _weights(
    weight, NORM: tl.constexpr, ZERO_CENTRED: tl.constexpr,
    DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """A norm's, [1, PLANES] twice."""
    if NORM:
        row = tl.arange(0, 1)[:, None]
        one, two = _load(weight, 0, row, row == 0, DIM, TURNING, INTERLEAVED, PLANES, 1)
        if ZERO_CENTRED:
            one, two = one + 1.0, two + 1.0
        return one, two
    else:
        return 0.0, 0.0


@triton.jit
def _angles(cos, sin, token, here, batch, of_sequence, of_batch, of_plane, TURNING: tl.constexpr, PLANES: tl.constexpr):
    """Cosines and sines of token [BLOCK, 1], [BLOCK, PLANES]; planes that do not turn have 1 and 0."""
    if TURNING > 0:
        plane = tl.arange(0, PLANES)[None, :]
        at = (token // batch) * of_sequence + (token % batch) * of_batch + plane * of_plane
        inside = here & (plane < TURNING)
        return tl.load(cos + at, mask=inside, other=1.0), tl.load(sin + at, mask=inside, other=0.0)
    else:
        return 1.0, 0.0


@triton.jit
def _scale(one, two, eps, DIM: tl.constexpr):
    """The reciprocal of each head's root mean square, [BLOCK, 1]."""
    return 1.0 / tl.sqrt(tl.sum(one * one + two * two, 1)[:, None] / DIM + eps)


@triton.jit
def _norm_and_turn(one, two, w_one, w_two, cos, sin, eps, DIM: tl.constexpr, TURNING: tl.constexpr, NORM: tl.constexpr):
    if NORM:
        scale = _scale(one, two, eps, DIM)
        one, two = one * scale * w_one, two * scale * w_two
    if TURNING > 0:
        one, two = one * cos - two * sin, two * cos + one * sin
    return one, two


@triton.jit
def _split(
    mixed, query, key, value, q_weight, k_weight, cos, sin, tokens, batch, of_sequence, of_batch, of_plane, eps,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, TURNING: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ZERO_CENTRED: tl.constexpr, PLANES: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    start, group = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1)
    row = tl.arange(0, BLOCK)[:, None]
    here = start + row < tokens
    WIDTH: tl.constexpr = (QUERIES * (2 if GATED else 1) + 2) * DIM
    mixed += (start * GROUPS + group) * WIDTH
    query += (start * GROUPS + group) * QUERIES * DIM
    key += (start * GROUPS + group) * DIM
    cos, sin = _angles(cos, sin, start + row, here, batch, of_sequence, of_batch, of_plane, TURNING, PLANES)
    w_one, w_two = _weights(q_weight, NORM, ZERO_CENTRED, DIM, TURNING, INTERLEAVED, PLANES)
    for head in range(QUERIES):
        one, two = _load(
            mixed + head * DIM, GROUPS * WIDTH, row, here, DIM, TURNING, INTERLEAVED, PLANES, BLOCK
        )  # fmt: skip
        one, two = _norm_and_turn(one, two, w_one, w_two, cos, sin, eps, DIM, TURNING, NORM)
        _store(
            query + head * DIM, GROUPS * QUERIES * DIM, row, here, one, two, DIM, TURNING, INTERLEAVED, PLANES, BLOCK
        )
    mixed += WIDTH - 2 * DIM
    w_one, w_two = _weights(k_weight, NORM, ZERO_CENTRED, DIM, TURNING, INTERLEAVED, PLANES)
    one, two = _load(mixed, GROUPS * WIDTH, row, here, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
    one, two = _norm_and_turn(one, two, w_one, w_two, cos, sin, eps, DIM, TURNING, NORM)
    _store(key, GROUPS * DIM, row, here, one, two, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
    if COPY:
        value += (start * GROUPS + group) * DIM
        one, two = _load(mixed + DIM, GROUPS * WIDTH, row, here, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        _store(value, GROUPS * DIM, row, here, one, two, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)


@triton.jit
def _turn_and_norm_back(
    grad_one, grad_two, mixed, at, of_row, row, here, w_one, w_two, cos, sin, eps, NORM: tl.constexpr,
    DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the heads as they came, which lie at mixed + at, and what each adds to those of the weight."""
    if TURNING > 0:
        grad_one, grad_two = grad_one * cos + grad_two * sin, grad_two * cos - grad_one * sin
    if NORM:
        one, two = _load(mixed + at, of_row, row, here, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        scale = _scale(one, two, eps, DIM)
        one, two = one * scale, two * scale
        share_one, share_two = grad_one * one, grad_two * two
        grad_one, grad_two = grad_one * w_one, grad_two * w_two
        along = tl.sum(grad_one * one + grad_two * two, 1)[:, None] / DIM
        return (grad_one - one * along) * scale, (grad_two - two * along) * scale, share_one, share_two
    else:
        return grad_one, grad_two, 0.0, 0.0


@triton.jit
def _store_sum(
    start, one, two, DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr
):
    row = tl.arange(0, 1)[:, None]
    one, two = tl.sum(one, 0)[None, :], tl.sum(two, 0)[None, :]
    _store(start, 0, row, row == 0, one, two, DIM, TURNING, INTERLEAVED, PLANES, 1)


@triton.jit
def _join(
    query, key, value, gate, mixed, grad_mixed, sums, q_weight, k_weight, cos, sin, tokens, tiles, batch,
    query_token, query_head, key_token, key_head, value_token, value_head, gate_token, gate_head,
    of_sequence, of_batch, of_plane, eps,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, TURNING: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ZERO_CENTRED: tl.constexpr, PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """query, key, value, gate: gradients, each with the strides of its tokens and of its heads.

    sums: the norms' gradients, or None where nobody needs them.
    """
    program, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, BLOCK)[:, None]
    WIDTH: tl.constexpr = (QUERIES * (2 if GATED else 1) + 2) * DIM
    of_row: tl.constexpr = GROUPS * WIDTH
    if sums is not None:
        sums += (program * GROUPS + group) * 2 * DIM
    # Queries first, then keys: what a program must keep in registers is one norm's.
    w_one, w_two = _weights(q_weight, NORM, ZERO_CENTRED, DIM, TURNING, INTERLEAVED, PLANES)
    sum_one = tl.zeros([BLOCK, PLANES], tl.float32)
    sum_two = tl.zeros([BLOCK, PLANES], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        start = tile * BLOCK
        here = start + row < tokens
        into = (start * GROUPS + group) * WIDTH
        c, s = _angles(cos, sin, start + row, here, batch, of_sequence, of_batch, of_plane, TURNING, PLANES)
        of_query = query + start * query_token + group * QUERIES * query_head
        for head in range(QUERIES):
            one, two = _load(
                of_query + head * query_head, query_token, row, here, DIM, TURNING, INTERLEAVED, PLANES, BLOCK
            )
            at = into + head * DIM
            one, two, share_one, share_two = _turn_and_norm_back(
                one, two, mixed, at, of_row, row, here, w_one, w_two, c, s, eps,
                NORM, DIM, TURNING, INTERLEAVED, PLANES, BLOCK,
            )  # fmt: skip
            _store(grad_mixed + at, of_row, row, here, one, two, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
            sum_one += share_one
            sum_two += share_two
        if GATED:
            of_gate = gate + start * gate_token + group * QUERIES * gate_head
            for head in range(QUERIES):
                one, two = _load(
                    of_gate + head * gate_head, gate_token, row, here, DIM, TURNING, INTERLEAVED, PLANES, BLOCK
                )
                at = into + (QUERIES + head) * DIM
                _store(grad_mixed + at, of_row, row, here, one, two, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
    if sums is not None:
        _store_sum(sums, sum_one, sum_two, DIM, TURNING, INTERLEAVED, PLANES)
    w_one, w_two = _weights(k_weight, NORM, ZERO_CENTRED, DIM, TURNING, INTERLEAVED, PLANES)
    sum_one = tl.zeros([BLOCK, PLANES], tl.float32)
    sum_two = tl.zeros([BLOCK, PLANES], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        start = tile * BLOCK
        here = start + row < tokens
        at = (start * GROUPS + group) * WIDTH + WIDTH - 2 * DIM
        c, s = _angles(cos, sin, start + row, here, batch, of_sequence, of_batch, of_plane, TURNING, PLANES)
        of_key = key + start * key_token + group * key_head
        one, two = _load(of_key, key_token, row, here, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        one, two, share_one, share_two = _turn_and_norm_back(
            one, two, mixed, at, of_row, row, here, w_one, w_two, c, s, eps,
            NORM, DIM, TURNING, INTERLEAVED, PLANES, BLOCK,
        )  # fmt: skip
        _store(grad_mixed + at, of_row, row, here, one, two, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        sum_one += share_one
        sum_two += share_two
        of_value = value + start * value_token + group * value_head
        one, two = _load(of_value, value_token, row, here, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        _store(grad_mixed + at + DIM, of_row, row, here, one, two, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
    if sums is not None:
        _store_sum(sums + DIM, sum_one, sum_two, DIM, TURNING, INTERLEAVED, PLANES)
