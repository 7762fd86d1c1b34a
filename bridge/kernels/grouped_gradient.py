"""Weight gradients of grouped products that are added to megatron-core's fp32 sums in the product's own kernel."""
# Calls of kernels:
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import LaunchArgs

# Of a matrix's gradient a program makes OUT x IN, from ROWS rows at a time: more than one program fits on a
# multiprocessor, and one multiplies while the other is at the sums, which take longer.
OUT, IN, ROWS = 128, 128, 64
WARPS = {True: 4, False: 8}  # with the copy engine, without


def add_products(totals: Tensor, grad_output: Tensor, inputs: Tensor, ends: Tensor) -> None:
    """totals[e] += grad_output[rows of e]^T @ inputs[rows of e], in fp32.

    totals [experts, out, in] fp32; grad_output [rows, out] and inputs [rows, in], both of one type and sorted by
    expert; ends int32 [experts]: where each expert's rows end. Each sum is added to once: the order is fixed.
    """
    experts, out_size, in_size = totals.shape
    grads, values = grad_output.contiguous(), inputs.contiguous()
    grid = (triton.cdiv(out_size, OUT) * triton.cdiv(in_size, IN), experts)
    copied = all(_copied_by_engine(rows) for rows in (grads, values))
    blocks: LaunchArgs = {"OUT": OUT, "IN": IN, "ROWS": ROWS, "num_warps": WARPS[copied], "num_stages": 3}
    if copied:
        grads, values = (
            TensorDescriptor.from_tensor(rows, [ROWS, width]) for rows, width in ((grads, OUT), (values, IN))
        )
    _add_products[grid](totals, grads, values, ends, out_size, in_size, COPIED=copied, **blocks)


def _copied_by_engine(rows: Tensor) -> bool:
    """Return whether the chip's copy engine can load tiles: from Hopper on, with rows of 16 bytes each."""
    if not rows.is_cuda or torch.cuda.get_device_capability(rows.device) < (9, 0):
        return False
    return rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0


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
    COPIED: tl.constexpr,
):
    expert = tl.program_id(1)
    first, last = tl.load(ends + expert - 1, expert > 0, other=0), tl.load(ends + expert)
    across = tl.cdiv(in_size, IN)
    at_out, at_in = tl.program_id(0) // across * OUT, tl.program_id(0) % across * IN
    if first < last:
        made = tl.zeros((OUT, IN), tl.float32)
        row = tl.arange(0, ROWS)[:, None]
        if COPIED:
            full_end = first + (last - first) // ROWS * ROWS
            for start in range(first, full_end, ROWS):
                a, b = grad_output.load([start, at_out]), inputs.load([start, at_in])
                made = tl.dot(tl.trans(a), b, made)
            if full_end < last:  # rows of the next expert come along
                a = tl.where(full_end + row < last, grad_output.load([full_end, at_out]), 0.0)
                b = tl.where(full_end + row < last, inputs.load([full_end, at_in]), 0.0)
                made = tl.dot(tl.trans(a), b, made)
        else:
            column_out, column_in = at_out + tl.arange(0, OUT)[None, :], at_in + tl.arange(0, IN)[None, :]
            grads = grad_output + (first + row).to(tl.int64) * out_size + column_out
            values = inputs + (first + row).to(tl.int64) * in_size + column_in
            for start in range(first, last, ROWS):
                there = start + row < last
                a = tl.load(grads, there & (column_out < out_size), other=0.0)
                b = tl.load(values, there & (column_in < in_size), other=0.0)
                made = tl.dot(tl.trans(a), b, made, input_precision="ieee")
                grads += ROWS * out_size
                values += ROWS * in_size
        corner = totals + (expert.to(tl.int64) * out_size + at_out) * in_size + at_in
        # By halves: registers for a whole tile more would leave a multiprocessor to one program.
        half: tl.constexpr = IN // 2
        left, right = tl.split(tl.permute(tl.reshape(made, (OUT, 2, half)), (0, 2, 1)))
        _add_tile(corner, left, out_size - at_out, in_size - at_in, in_size)
        _add_tile(corner + half, right, out_size - at_out, in_size - at_in - half, in_size)


@triton.jit
def _add_tile(corner, made, outs, ins, stride):
    """Add `made` to the sums that begin at `corner`, of which `outs` x `ins` are its own."""
    row, column = tl.arange(0, made.shape[0])[:, None], tl.arange(0, made.shape[1])[None, :]
    total, there = corner + row * stride + column, (row < outs) & (column < ins)
    tl.store(total, tl.load(total, there) + made, there)
