"""Fused split, RMSNorm and rotation of queries, keys and values: a forward and a backward kernel.

The QKV tensor has the heads of each query group side by side: [queries..., (gates...,) key, value]. A program handles a
few tokens of one group, and each head as planes: pairs of dimensions that rotate together. Besides the gradients, the
backward pass needs only the QKV tensor, so the value can be a view of it.
"""
# Calls of kernels, and functions that return in both branches of an `if` at compile time:
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs, rotate_heads
from .partial_sums import sum_parts

# Planes per tile, and warps: forward 16 bytes of bf16 per thread, backward fewer since more values are kept.
FORWARD, BACKWARD, UNALIGNED_BACKWARD = (512, 4), (512, 2), (512, 4)
PROGRAMS = 2048  # approximate number in a backward pass; each sums its tokens' part of the norms' gradients


@dataclass(frozen=True)
class HeadLayout:
    """Layout of a token's heads in the QKV tensor, with their norms and rotation."""

    groups: int
    queries: int  # per group
    dim: int  # even
    gated: bool = False  # the queries are followed by as many gates
    eps: float = 0.0
    zero_centred: bool = False  # the norms multiply by 1 + weight
    interleaved: bool = False  # planes are neighbouring dimensions; else one from each half of the rotated dimensions
    view_value: bool = False  # the value is a view of the input, not a copy
    padded_dim: int | None = None  # size to which the outputs' heads are padded with zeros; None: dim


def split_heads(
    qkv: Tensor, norms: tuple[Tensor, Tensor] | None, rotary: tuple[Tensor, Tensor] | None, layout: HeadLayout
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return query, key, value and gate: [sequence, batch, heads, dim or padded_dim], or without batch if qkv has none.

    Query and gate have groups * queries heads, key and value have groups. Padding is not for views of values.

    qkv: [sequence, (batch,) groups * (queries (+ gates) + 2) * dim]
    norms: weights [dim] of the queries' and the keys' RMSNorm
    rotary: cos and sin [sequence, batch, planes] fp32 of the first 2 * planes dimensions
    """
    outputs = _SplitHeads.apply(qkv.contiguous(), *(norms or (None, None)), *(rotary or (None, None)), layout)
    query, key, value, gate = outputs  # type: ignore[misc]
    return query, key, value, None if gate is None else gate.flatten(-3, -2)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        layout: HeadLayout,
    ):
        shape, tokens, batch = qkv.shape, qkv.shape[:-1].numel(), qkv.shape[1] if qkv.dim() > 2 else 1
        padded_dim = layout.padded_dim or layout.dim
        query = qkv.new_empty((*shape[:-1], layout.groups * layout.queries, padded_dim))
        key = qkv.new_empty((*shape[:-1], layout.groups, padded_dim)) if layout.queries > 1 else torch.empty_like(query)
        gate = None
        if layout.view_value or layout.gated:
            grouped = qkv.view(*shape[:-1], layout.groups, -1, layout.dim)
            gate = grouped[..., layout.queries : 2 * layout.queries, :] if layout.gated else None
        value = grouped[..., -1, :] if layout.view_value else torch.empty_like(key)
        ctx.save_for_backward(None if q_weight is None else qkv, q_weight, k_weight, cos, sin)
        ctx.shape, ctx.layout, ctx.tokens, ctx.batch = shape, layout, tokens, batch
        ctx.only_rotates = q_weight is None and _only_rotates(layout, cos)
        if ctx.only_rotates and cos is not None and sin is not None and padded_dim == layout.dim:
            outputs = [x.view(-1, layout.groups, layout.dim) for x in (query, key, value)]
            rotate_heads.rotate_heads(qkv.view(-1, layout.groups, 3, layout.dim).unbind(2), outputs, cos, sin)
            return query, key, value, None
        block, constants = _launch(layout, q_weight is not None, 0 if cos is None else cos.shape[-1], *FORWARD)
        _forward[-(-tokens // block), layout.groups](
            qkv, query, key, value, q_weight, k_weight, cos, sin, tokens, batch, *_strides(cos), layout.eps,
            COPY=not layout.view_value, PADDED=padded_dim, **constants,
        )  # fmt: skip
        return query, key, value, gate

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        layout: HeadLayout = ctx.layout
        tokens, batch = ctx.tokens, ctx.batch
        *heads, gate = grads
        (query, *query_strides), (key, *key_strides), (value, *value_strides) = (
            _with_strides(grad, batch) for grad in cast(list[Tensor], heads)
        )
        gate_strides = [0, 0]
        if gate is not None:
            gate, *gate_strides = _with_strides(gate.flatten(-3, -2), batch)
        grad_qkv = query.new_empty(ctx.shape)
        if ctx.only_rotates:
            inputs = [x.flatten(0, -3)[..., : layout.dim] for x in (query, key, value)]
            outputs = grad_qkv.view(-1, layout.groups, 3, layout.dim).unbind(2)
            rotate_heads.rotate_heads(inputs, outputs, cos, sin, inverse=True)
            return grad_qkv, None, None, None, None, None
        sizes = UNALIGNED_BACKWARD if layout.dim % 32 else BACKWARD
        block, constants = _launch(layout, q_weight is not None, 0 if cos is None else cos.shape[-1], *sizes)
        tiles, groups = -(-tokens // block), layout.groups
        programs = min(tiles, -(-PROGRAMS // groups))
        sums = None
        if any(ctx.needs_input_grad[1:3]):
            sums = query.new_empty(programs * groups, 2, layout.dim, dtype=torch.float32)
        strides = *query_strides, *key_strides, *value_strides, *gate_strides
        _backward[programs, groups](
            query, key, value, gate, qkv, grad_qkv, sums, q_weight, k_weight, cos, sin, tokens, tiles,
            batch, *strides, *_strides(cos), layout.eps, **constants,
        )  # fmt: skip
        if sums is None:
            return grad_qkv, None, None, None, None, None
        return grad_qkv, *sum_parts((q_weight, k_weight), sums), None, None, None


def _only_rotates(layout: HeadLayout, cos: Tensor | None) -> bool:
    """Return whether heads without norms take the kernel of rotate_heads.py."""
    is_plain = layout.queries == 1 and not (layout.gated or layout.interleaved or layout.view_value)
    return is_plain and rotate_heads.is_supported(layout.dim, cos)


def _with_strides(grad: Tensor, batch: int) -> tuple[Tensor, int, int]:
    """Return a gradient [sequence, (batch,) heads, dim], without a copy if possible, and two strides."""
    if grad.stride(-1) != 1 or (batch > 1 and grad.stride(0) != batch * grad.stride(1)):
        grad = grad.contiguous()
    return grad, grad.stride(1 if batch > 1 else 0), grad.stride(-2)


def _strides(cos: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if cos is None else cos.stride()


@cache
def _launch(layout: HeadLayout, has_norm: bool, turning: int, tile: int, warps: int) -> tuple[int, LaunchArgs]:
    """Return the tokens of a tile and the compile-time constants. turning: planes that rotate"""
    planes = 1 << (layout.dim // 2 - 1).bit_length()
    block = max(tile // planes, 1)
    constants = {
        "GROUPS": layout.groups,
        "QUERIES": layout.queries,
        "DIM": layout.dim,
        "TURNING": turning,
        "GATED": layout.gated,
        "INTERLEAVED": layout.interleaved,
        "NORM": has_norm,
        "ZERO_CENTRED": layout.zero_centred,
        "PLANES": planes,
        "BLOCK": block,
        "num_warps": warps,
    }
    return block, constants


@triton.jit
def _plane_dims(DIM: tl.constexpr, TURNING: tl.constexpr, PLANES: tl.constexpr):
    """Return the two dimensions of each plane, [1, PLANES]; dimensions that do not rotate are paired too."""
    plane = tl.arange(0, PLANES)[None, :]
    if 2 * TURNING == DIM or TURNING == 0:
        return plane, plane + DIM // 2
    else:
        is_rotated = plane < TURNING
        return tl.where(is_rotated, plane, plane + TURNING), tl.where(is_rotated, plane + TURNING, plane + DIM // 2)


@triton.jit
def _load(
    start, row_stride, row, valid,
    DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Load both dimensions of each plane of the heads at `start`, one head per row: [ROWS, PLANES] twice."""
    if INTERLEAVED:
        at = tl.arange(0, 2 * PLANES)[None, :]
        head = tl.load(start + row * row_stride + at, mask=valid & (at < DIM), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(head, [ROWS, PLANES, 2]))
    else:
        first, second = _plane_dims(DIM, TURNING, PLANES)
        mask = valid & (tl.arange(0, PLANES)[None, :] < DIM // 2)
        x1 = tl.load(start + row * row_stride + first, mask=mask, other=0.0).to(tl.float32)
        return x1, tl.load(start + row * row_stride + second, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(
    start, row_stride, row, valid, x1, x2,
    DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        at = tl.arange(0, 2 * PLANES)[None, :]
        head = tl.reshape(tl.join(x1, x2), [ROWS, 2 * PLANES])
        tl.store(start + row * row_stride + at, head.to(start.dtype.element_ty), mask=valid & (at < DIM))
    else:
        first, second = _plane_dims(DIM, TURNING, PLANES)
        mask = valid & (tl.arange(0, PLANES)[None, :] < DIM // 2)
        tl.store(start + row * row_stride + first, x1.to(start.dtype.element_ty), mask=mask)
        tl.store(start + row * row_stride + second, x2.to(start.dtype.element_ty), mask=mask)


@triton.jit
def _store_padded(
    start, row_stride, row, valid, x1, x2, DIM: tl.constexpr, PADDED: tl.constexpr,
    TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store heads, and zeros after the DIM dimensions of each."""
    _store(start, row_stride, row, valid, x1, x2, DIM, TURNING, INTERLEAVED, PLANES, ROWS)
    for first in tl.static_range(DIM, PADDED, 2 * PLANES):
        at = first + tl.arange(0, 2 * PLANES)[None, :]
        zeros = tl.zeros([ROWS, 2 * PLANES], start.dtype.element_ty)
        tl.store(start + row * row_stride + at, zeros, mask=valid & (at < PADDED))


@triton.jit
def _weights(
    weight, NORM: tl.constexpr, ZERO_CENTRED: tl.constexpr,
    DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Load a norm's weights, [1, PLANES] twice."""
    if NORM:
        row = tl.arange(0, 1)[:, None]
        x1, x2 = _load(weight, 0, row, row == 0, DIM, TURNING, INTERLEAVED, PLANES, 1)
        if ZERO_CENTRED:
            x1, x2 = x1 + 1.0, x2 + 1.0
        return x1, x2
    else:
        return 0.0, 0.0


@triton.jit
def _angles(
    cos, sin, token, valid, batch, seq_stride, batch_stride, plane_stride, TURNING: tl.constexpr, PLANES: tl.constexpr
):
    """Load cos and sin [BLOCK, PLANES] of token [BLOCK, 1]; planes that do not rotate have 1 and 0."""
    if TURNING > 0:
        plane = tl.arange(0, PLANES)[None, :]
        at = (token // batch) * seq_stride + (token % batch) * batch_stride + plane * plane_stride
        mask = valid & (plane < TURNING)
        return tl.load(cos + at, mask=mask, other=1.0), tl.load(sin + at, mask=mask, other=0.0)
    else:
        return 1.0, 0.0


@triton.jit
def _scale(x1, x2, eps, DIM: tl.constexpr):
    """Return the reciprocal of each head's root mean square, [BLOCK, 1]."""
    return 1.0 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, 1)[:, None] / DIM + eps)


@triton.jit
def _norm_and_rotate(x1, x2, w1, w2, cos, sin, eps, DIM: tl.constexpr, TURNING: tl.constexpr, NORM: tl.constexpr):
    if NORM:
        scale = _scale(x1, x2, eps, DIM)
        x1, x2 = x1 * scale * w1, x2 * scale * w2
    if TURNING > 0:
        x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return x1, x2


@triton.jit
def _forward(
    qkv, query, key, value, q_weight, k_weight, cos, sin, tokens, batch, seq_stride, batch_stride, plane_stride, eps,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, TURNING: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ZERO_CENTRED: tl.constexpr, PLANES: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    start, group = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1)
    row = tl.arange(0, BLOCK)[:, None]
    valid = start + row < tokens
    WIDTH: tl.constexpr = (QUERIES * (2 if GATED else 1) + 2) * DIM
    qkv += (start * GROUPS + group) * WIDTH
    query += (start * GROUPS + group) * QUERIES * PADDED
    key += (start * GROUPS + group) * PADDED
    cos, sin = _angles(cos, sin, start + row, valid, batch, seq_stride, batch_stride, plane_stride, TURNING, PLANES)
    w1, w2 = _weights(q_weight, NORM, ZERO_CENTRED, DIM, TURNING, INTERLEAVED, PLANES)
    for head in range(QUERIES):
        x1, x2 = _load(
            qkv + head * DIM, GROUPS * WIDTH, row, valid, DIM, TURNING, INTERLEAVED, PLANES, BLOCK
        )  # fmt: skip
        x1, x2 = _norm_and_rotate(x1, x2, w1, w2, cos, sin, eps, DIM, TURNING, NORM)
        _store_padded(
            query + head * PADDED, GROUPS * QUERIES * PADDED, row, valid, x1, x2,
            DIM, PADDED, TURNING, INTERLEAVED, PLANES, BLOCK,
        )  # fmt: skip
    qkv += WIDTH - 2 * DIM
    w1, w2 = _weights(k_weight, NORM, ZERO_CENTRED, DIM, TURNING, INTERLEAVED, PLANES)
    x1, x2 = _load(qkv, GROUPS * WIDTH, row, valid, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
    x1, x2 = _norm_and_rotate(x1, x2, w1, w2, cos, sin, eps, DIM, TURNING, NORM)
    _store_padded(key, GROUPS * PADDED, row, valid, x1, x2, DIM, PADDED, TURNING, INTERLEAVED, PLANES, BLOCK)
    if COPY:
        value += (start * GROUPS + group) * PADDED
        x1, x2 = _load(qkv + DIM, GROUPS * WIDTH, row, valid, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        _store_padded(value, GROUPS * PADDED, row, valid, x1, x2, DIM, PADDED, TURNING, INTERLEAVED, PLANES, BLOCK)


@triton.jit
def _norm_and_rotate_backward(
    grad1, grad2, qkv, at, row_stride, row, valid, w1, w2, cos, sin, eps, NORM: tl.constexpr,
    DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the gradients of the heads at qkv + at, and their contributions to the weight's gradient."""
    if TURNING > 0:
        grad1, grad2 = grad1 * cos + grad2 * sin, grad2 * cos - grad1 * sin
    if NORM:
        x1, x2 = _load(qkv + at, row_stride, row, valid, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        scale = _scale(x1, x2, eps, DIM)
        x1, x2 = x1 * scale, x2 * scale
        weight_grad1, weight_grad2 = grad1 * x1, grad2 * x2
        grad1, grad2 = grad1 * w1, grad2 * w2
        mean_dot = tl.sum(grad1 * x1 + grad2 * x2, 1)[:, None] / DIM
        return (grad1 - x1 * mean_dot) * scale, (grad2 - x2 * mean_dot) * scale, weight_grad1, weight_grad2
    else:
        return grad1, grad2, 0.0, 0.0


@triton.jit
def _store_sum(
    start, x1, x2, DIM: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, PLANES: tl.constexpr
):
    row = tl.arange(0, 1)[:, None]
    x1, x2 = tl.sum(x1, 0)[None, :], tl.sum(x2, 0)[None, :]
    _store(start, 0, row, row == 0, x1, x2, DIM, TURNING, INTERLEAVED, PLANES, 1)


@triton.jit
def _backward(
    query, key, value, gate, qkv, grad_qkv, sums, q_weight, k_weight, cos, sin, tokens, tiles, batch,
    query_token, query_head, key_token, key_head, value_token, value_head, gate_token, gate_head,
    seq_stride, batch_stride, plane_stride, eps,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, TURNING: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, ZERO_CENTRED: tl.constexpr, PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the QKV tensor, and the norms' gradients to `sums` unless it is None.

    query, key, value, gate: gradients, each with its strides over tokens and heads.
    """
    program, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, BLOCK)[:, None]
    WIDTH: tl.constexpr = (QUERIES * (2 if GATED else 1) + 2) * DIM
    row_stride: tl.constexpr = GROUPS * WIDTH
    if sums is not None:
        sums += (program * GROUPS + group) * 2 * DIM
    # First all queries, then all keys, so that registers hold the gradient of one norm at a time.
    w1, w2 = _weights(q_weight, NORM, ZERO_CENTRED, DIM, TURNING, INTERLEAVED, PLANES)
    sum1 = tl.zeros([BLOCK, PLANES], tl.float32)
    sum2 = tl.zeros([BLOCK, PLANES], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        start = tile * BLOCK
        valid = start + row < tokens
        offset = (start * GROUPS + group) * WIDTH
        c, s = _angles(cos, sin, start + row, valid, batch, seq_stride, batch_stride, plane_stride, TURNING, PLANES)
        group_query = query + start * query_token + group * QUERIES * query_head
        for head in range(QUERIES):
            x1, x2 = _load(
                group_query + head * query_head, query_token, row, valid, DIM, TURNING, INTERLEAVED, PLANES, BLOCK
            )
            at = offset + head * DIM
            x1, x2, weight_grad1, weight_grad2 = _norm_and_rotate_backward(
                x1, x2, qkv, at, row_stride, row, valid, w1, w2, c, s, eps,
                NORM, DIM, TURNING, INTERLEAVED, PLANES, BLOCK,
            )  # fmt: skip
            _store(grad_qkv + at, row_stride, row, valid, x1, x2, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
            sum1 += weight_grad1
            sum2 += weight_grad2
        if GATED:
            group_gate = gate + start * gate_token + group * QUERIES * gate_head
            for head in range(QUERIES):
                x1, x2 = _load(
                    group_gate + head * gate_head, gate_token, row, valid, DIM, TURNING, INTERLEAVED, PLANES, BLOCK
                )
                at = offset + (QUERIES + head) * DIM
                _store(grad_qkv + at, row_stride, row, valid, x1, x2, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
    if sums is not None:
        _store_sum(sums, sum1, sum2, DIM, TURNING, INTERLEAVED, PLANES)
    w1, w2 = _weights(k_weight, NORM, ZERO_CENTRED, DIM, TURNING, INTERLEAVED, PLANES)
    sum1 = tl.zeros([BLOCK, PLANES], tl.float32)
    sum2 = tl.zeros([BLOCK, PLANES], tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        start = tile * BLOCK
        valid = start + row < tokens
        at = (start * GROUPS + group) * WIDTH + WIDTH - 2 * DIM
        c, s = _angles(cos, sin, start + row, valid, batch, seq_stride, batch_stride, plane_stride, TURNING, PLANES)
        group_key = key + start * key_token + group * key_head
        x1, x2 = _load(group_key, key_token, row, valid, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        x1, x2, weight_grad1, weight_grad2 = _norm_and_rotate_backward(
            x1, x2, qkv, at, row_stride, row, valid, w1, w2, c, s, eps,
            NORM, DIM, TURNING, INTERLEAVED, PLANES, BLOCK,
        )  # fmt: skip
        _store(grad_qkv + at, row_stride, row, valid, x1, x2, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        sum1 += weight_grad1
        sum2 += weight_grad2
        group_value = value + start * value_token + group * value_head
        x1, x2 = _load(group_value, value_token, row, valid, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
        _store(grad_qkv + at + DIM, row_stride, row, valid, x1, x2, DIM, TURNING, INTERLEAVED, PLANES, BLOCK)
    if sums is not None:
        _store_sum(sums + DIM, sum1, sum2, DIM, TURNING, INTERLEAVED, PLANES)
