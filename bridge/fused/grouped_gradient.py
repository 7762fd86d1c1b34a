"""Weight gradients of grouped products that are added to megatron-core's fp32 sums in the product's own kernel."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# How the sums are reached: "load" (read, added to, written), "reduce" (added to in the L2 cache, without an answer),
# "tma" (the same by the copy engine, which brings the rows, too), "temporary" (the product in bf16 first).
WAY = "load"
# Of a matrix's gradient a program makes OUT x IN, from ROWS rows at a time: two programs fit on a multiprocessor, and
# one multiplies while the other is at the sums, which take longer.
BLOCKS: dict[str, Any] = {"OUT": 128, "IN": 128, "ROWS": 64, "num_warps": 8, "num_stages": 3}


def add_products(totals: Tensor, grad_output: Tensor, inputs: Tensor, ends: Tensor) -> None:
    """totals[e] += grad_output[rows of e]^T @ inputs[rows of e], in fp32.

    totals [experts, out, in] fp32; grad_output [rows, out] and inputs [rows, in], both of one type and sorted by
    expert; ends int32 [experts]: where each expert's rows end. Each sum is added to once: the order is fixed.
    """
    experts, out_size, in_size = totals.shape
    grad_output, inputs = grad_output.contiguous(), inputs.contiguous()
    grid = (triton.cdiv(out_size, BLOCKS["OUT"]) * triton.cdiv(in_size, BLOCKS["IN"]), experts)
    if WAY == "temporary":
        product = torch.nn.functional.grouped_mm(grad_output.t(), inputs, offs=ends)
        block: dict[str, Any] = {"BLOCK": 4096, "num_warps": 8}
        _add[(triton.cdiv(totals.numel(), 4096),)](totals, product, totals.numel(), **block)
    elif WAY == "tma" and totals.data_ptr() % 16 == 0:
        out, in_, rows = BLOCKS["OUT"], BLOCKS["IN"], BLOCKS["ROWS"]
        sums: Any = TensorDescriptor.from_tensor(totals, [1, out, in_])
        grads: Any = TensorDescriptor.from_tensor(grad_output, [rows, out])
        values: Any = TensorDescriptor.from_tensor(inputs, [rows, in_])
        _add_products_by_tma[grid](sums, grads, values, ends, in_size, **BLOCKS)
    else:
        blocks: dict[str, Any] = BLOCKS | {"REDUCE": WAY != "load"}
        _add_products[grid](totals, grad_output, inputs, ends, out_size, in_size, **blocks)


@triton.jit
def _add_products(
    totals,
    grad_output,
    inputs,
    ends,
    out_size,
    in_size,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    REDUCE: tl.constexpr,
):
    expert = tl.program_id(1)
    first, last = tl.load(ends + expert - 1, expert > 0, other=0), tl.load(ends + expert)
    across = tl.cdiv(in_size, IN)
    at_out, at_in = tl.program_id(0) // across * OUT, tl.program_id(0) % across * IN
    column_out, column_in = at_out + tl.arange(0, OUT), at_in + tl.arange(0, IN)
    if first < last:
        row = tl.arange(0, ROWS)[:, None]
        grads = grad_output + (first + row).to(tl.int64) * out_size + column_out[None, :]
        values = inputs + (first + row).to(tl.int64) * in_size + column_in[None, :]
        made = tl.zeros((OUT, IN), tl.float32)
        for start in range(first, last, ROWS):
            there = start + row < last
            a = tl.load(grads, there & (column_out[None, :] < out_size), other=0.0)
            b = tl.load(values, there & (column_in[None, :] < in_size), other=0.0)
            made = tl.dot(tl.trans(a), b, made, input_precision="ieee")
            grads += ROWS * out_size
            values += ROWS * in_size
        corner = totals + (expert.to(tl.int64) * out_size + at_out) * in_size + at_in
        if REDUCE:
            _add_tile(corner, made, out_size - at_out, in_size - at_in, in_size, True)
        else:  # by halves: registers for a whole tile more would leave a multiprocessor to one program
            half: tl.constexpr = IN // 2
            left, right = tl.split(tl.permute(tl.reshape(made, (OUT, 2, half)), (0, 2, 1)))
            _add_tile(corner, left, out_size - at_out, in_size - at_in, in_size, False)
            _add_tile(corner + half, right, out_size - at_out, in_size - at_in - half, in_size, False)


@triton.jit
def _add_tile(corner, made, outs, ins, stride, REDUCE: tl.constexpr):
    """Add `made` to the sums that begin at `corner`, of which `outs` x `ins` are its own."""
    row, column = tl.arange(0, made.shape[0])[:, None], tl.arange(0, made.shape[1])[None, :]
    total, there = corner + row * stride + column, (row < outs) & (column < ins)
    if REDUCE:
        tl.atomic_add(total, made, there, sem="relaxed")
    else:
        tl.store(total, tl.load(total, there) + made, there)


@triton.jit
def _add_products_by_tma(
    totals, grad_output, inputs, ends, in_size, OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr
):
    expert = tl.program_id(1)
    first, last = tl.load(ends + expert - 1, expert > 0, other=0), tl.load(ends + expert)
    across = tl.cdiv(in_size, IN)
    at_out, at_in = tl.program_id(0) // across * OUT, tl.program_id(0) % across * IN
    if first < last:
        made = tl.zeros((OUT, IN), tl.float32)
        whole = first + (last - first) // ROWS * ROWS
        for start in range(first, whole, ROWS):
            a, b = grad_output.load([start, at_out]), inputs.load([start, at_in])
            made = tl.dot(tl.trans(a), b, made)
        if whole < last:  # rows of the next expert come along
            there = whole + tl.arange(0, ROWS)[:, None] < last
            a = tl.where(there, grad_output.load([whole, at_out]), 0.0)
            b = tl.where(there, inputs.load([whole, at_in]), 0.0)
            made = tl.dot(tl.trans(a), b, made)
        totals.atomic_add([expert, at_out, at_in], tl.reshape(made, (1, OUT, IN)))


@triton.jit
def _add(totals, products, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(products + at, at < size).to(tl.float32)
    tl.store(totals + at, tl.load(totals + at, at < size) + product, at < size)
