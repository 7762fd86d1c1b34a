"""Weight gradients of grouped products that are added to megatron-core's fp32 sums in the product's own kernel."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Of a matrix's gradient a program makes OUT x IN, from ROWS rows at a time: two programs fit on a multiprocessor, and
# the one multiplies while the other reads and writes the sums, which is what most of the time goes by.
BLOCKS: dict[str, Any] = {"OUT": 128, "IN": 128, "ROWS": 64, "num_warps": 8, "num_stages": 3}


def add_products(totals: Tensor, grad_output: Tensor, inputs: Tensor, ends: Tensor) -> None:
    """totals[e] += grad_output[rows of e]^T @ inputs[rows of e], in fp32.

    totals [experts, out, in] fp32; grad_output [rows, out] and inputs [rows, in], both of one type and sorted by
    expert; ends int32 [experts]: where each expert's rows end.
    """
    experts, out_size, in_size = totals.shape
    tiles = triton.cdiv(out_size, BLOCKS["OUT"]) * triton.cdiv(in_size, BLOCKS["IN"])
    _add_products[(tiles, experts)](
        totals, grad_output.contiguous(), inputs.contiguous(), ends, out_size, in_size, **BLOCKS
    )


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
):
    expert = tl.program_id(1)
    first = tl.load(ends + expert - 1, expert > 0, other=0)
    last = tl.load(ends + expert)
    across = tl.cdiv(in_size, IN)
    column_out = tl.program_id(0) // across * OUT + tl.arange(0, OUT)
    column_in = tl.program_id(0) % across * IN + tl.arange(0, IN)
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
        total = totals + (expert.to(tl.int64) * out_size + column_out[:, None]) * in_size + column_in[None, :]
        there = (column_out[:, None] < out_size) & (column_in[None, :] < in_size)
        tl.store(total, tl.load(total, there) + made, there)
