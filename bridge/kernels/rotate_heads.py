"""Rotation of heads whose number of planes is no power of two, as the vision towers' 72 dimensions have.

A tile of whole heads would leave many of its lanes idle. Here lanes are the planes of all heads, one after another, in
vectors of VECTOR planes, which lie within a head.
"""
# Calls of kernels:
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

VECTOR, BLOCK, WARPS = 4, 512, 4


def is_supported(dim: int, cos: Tensor | None) -> bool:
    """Return whether heads of `dim` dimensions, of which all rotate, take this kernel. cos: [..., planes]"""
    planes = dim // 2
    return (
        cos is not None
        and cos.shape[-1] == planes
        and planes & (planes - 1) != 0
        and planes % VECTOR == 0
        and _is_aligned(cos)
    )


def rotate_heads(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], cos: Tensor, sin: Tensor, *, inverse: bool = False
) -> None:
    """Write the rotated queries and keys, and the values, to `outputs`.

    inputs, outputs: query, key and value, [tokens, heads, dim] each
    cos, sin: [sequence, batch, dim / 2] fp32, tokens = sequence * batch
    inverse: rotate the other way, as the backward pass does
    """
    inputs = [x if _is_aligned(x) else x.contiguous() for x in inputs]
    tokens, heads, dim = inputs[0].shape
    planes = tokens * heads * (dim // 2)
    if planes:
        strides = [stride for x in (*inputs, *outputs) for stride in x.stride()[:2]]
        _rotate[triton.cdiv(planes, BLOCK),](
            *inputs, *outputs, *strides, cos, sin, cos.shape[1], *cos.stride()[:2], planes, -1.0 if inverse else 1.0,
            HEADS=heads, HALF=dim // 2, VECTOR=VECTOR, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _is_aligned(x: Tensor) -> bool:
    """Return whether all vectors of its rows start at a multiple of a vector's size."""
    is_vector = x.stride(-1) == 1 and all(stride % VECTOR == 0 for stride in x.stride()[:-1])
    return is_vector and x.data_ptr() % (VECTOR * x.element_size()) == 0


@triton.jit
def _rotate(
    query, key, value, query_out, key_out, value_out, query_token, query_head, key_token, key_head, value_token,
    value_head, query_out_token, query_out_head, key_out_token, key_out_head, value_out_token, value_out_head,
    cos, sin, batch, seq_stride, batch_stride, planes, direction,
    HEADS: tl.constexpr, HALF: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = lane < planes
    plane, row = lane % HALF, lane // HALF
    head, token = row % HEADS, row // HEADS
    at = _vectors((token // batch) * seq_stride + (token % batch) * batch_stride + plane, VECTOR)
    c, s = tl.load(cos + at, valid, other=1.0), tl.load(sin + at, valid, other=0.0) * direction
    x1, x2 = _load(query, query_token, query_head, token, head, plane, valid, HALF, VECTOR)
    x1, x2 = x1 * c - x2 * s, x2 * c + x1 * s
    _store(query_out, query_out_token, query_out_head, token, head, plane, valid, x1, x2, HALF, VECTOR)
    x1, x2 = _load(key, key_token, key_head, token, head, plane, valid, HALF, VECTOR)
    x1, x2 = x1 * c - x2 * s, x2 * c + x1 * s
    _store(key_out, key_out_token, key_out_head, token, head, plane, valid, x1, x2, HALF, VECTOR)
    x1, x2 = _load(value, value_token, value_head, token, head, plane, valid, HALF, VECTOR)
    _store(value_out, value_out_token, value_out_head, token, head, plane, valid, x1, x2, HALF, VECTOR)


@triton.jit
def _vectors(at, VECTOR: tl.constexpr):
    """Tell the compiler that the offsets are those of whole vectors."""
    return tl.max_contiguous(tl.multiple_of(at, VECTOR), VECTOR)


@triton.jit
def _load(start, token_stride, head_stride, token, head, plane, valid, HALF: tl.constexpr, VECTOR: tl.constexpr):
    at = _vectors(token.to(tl.int64) * token_stride + head * head_stride + plane, VECTOR)
    x1 = tl.load(start + at, valid, other=0.0).to(tl.float32)
    return x1, tl.load(start + _vectors(at + HALF, VECTOR), valid, other=0.0).to(tl.float32)


@triton.jit
def _store(
    start, token_stride, head_stride, token, head, plane, valid, x1, x2, HALF: tl.constexpr, VECTOR: tl.constexpr
):
    at = _vectors(token.to(tl.int64) * token_stride + head * head_stride + plane, VECTOR)
    tl.store(start + at, x1.to(start.dtype.element_ty), valid)
    tl.store(start + _vectors(at + HALF, VECTOR), x2.to(start.dtype.element_ty), valid)
