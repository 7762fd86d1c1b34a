"""Weight gradients of grouped products, accumulated into megatron-core's fp32 `main_grad` within the kernel."""
# Calls of kernels:
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import LaunchArgs

# A program computes a tile of OUT x IN. More than one program fits on a multiprocessor: one
# multiplies while the other adds to `main_grad`, which takes longer.
OUT, IN = 128, 128
# Rows per iteration and stages, with and without the copy engine
ROWS, STAGES, WARPS = {True: 32, False: 64}, {True: 5, False: 3}, 8


def add_products(totals: Tensor, grad_output: Tensor, inputs: Tensor, ends: Tensor) -> None:
    """totals[e] += grad_output[rows of e]^T @ inputs[rows of e], in fp32.

    totals [experts, out, in] fp32; grad_output [rows, out] and inputs [rows, in], both of one type and sorted by
    expert; ends int32 [experts]: end of each expert's rows. Each element is added to once, so the order is fixed.
    """
    experts, out_size, in_size = totals.shape
    grads, values = grad_output.contiguous(), inputs.contiguous()
    grid = (triton.cdiv(out_size, OUT) * triton.cdiv(in_size, IN), experts)
    has_copy_engine = all(_supports_copy_engine(rows) for rows in (grads, values))
    iteration_rows, stages = ROWS[has_copy_engine], STAGES[has_copy_engine]
    blocks: LaunchArgs = {"OUT": OUT, "IN": IN, "ROWS": iteration_rows, "num_warps": WARPS, "num_stages": stages}
    if has_copy_engine:
        grads, values = (
            TensorDescriptor.from_tensor(rows, [iteration_rows, width]) for rows, width in ((grads, OUT), (values, IN))
        )
    _add_products[grid](totals, grads, values, ends, out_size, in_size, COPY_ENGINE=has_copy_engine, **blocks)


def _supports_copy_engine(rows: Tensor) -> bool:
    """Return whether the copy engine can load tiles: from Hopper on, with rows aligned to 16 bytes."""
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
    COPY_ENGINE: tl.constexpr,
):
    expert = tl.program_id(1)
    first, last = tl.load(ends + expert - 1, expert > 0, other=0), tl.load(ends + expert)
    across = tl.cdiv(in_size, IN)
    at_out, at_in = tl.program_id(0) // across * OUT, tl.program_id(0) % across * IN
    if first < last:
        acc = tl.zeros((OUT, IN), tl.float32)
        row = tl.arange(0, ROWS)[:, None]
        if COPY_ENGINE:
            full_end = first + (last - first) // ROWS * ROWS
            for start in range(first, full_end, ROWS):
                a, b = grad_output.load([start, at_out]), inputs.load([start, at_in])
                acc = tl.dot(tl.trans(a), b, acc)
            if full_end < last:  # this tile includes rows of the next expert
                a = tl.where(full_end + row < last, grad_output.load([full_end, at_out]), 0.0)
                b = tl.where(full_end + row < last, inputs.load([full_end, at_in]), 0.0)
                acc = tl.dot(tl.trans(a), b, acc)
        else:
            column_out, column_in = at_out + tl.arange(0, OUT)[None, :], at_in + tl.arange(0, IN)[None, :]
            grads = grad_output + (first + row).to(tl.int64) * out_size + column_out
            values = inputs + (first + row).to(tl.int64) * in_size + column_in
            for start in range(first, last, ROWS):
                mask = start + row < last
                a = tl.load(grads, mask & (column_out < out_size), other=0.0)
                b = tl.load(values, mask & (column_in < in_size), other=0.0)
                acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
                grads += ROWS * out_size
                values += ROWS * in_size
        corner = totals + (expert.to(tl.int64) * out_size + at_out) * in_size + at_in
        # In halves: registers for another full tile would leave room for only one program on a multiprocessor.
        half: tl.constexpr = IN // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (OUT, 2, half)), (0, 2, 1)))
        _add_tile(corner, left, out_size - at_out, in_size - at_in, in_size)
        _add_tile(corner + half, right, out_size - at_out, in_size - at_in - half, in_size)


@triton.jit
def _add_tile(corner, acc, outs, ins, stride):
    """Add `acc` to the elements from `corner` on, limited to `outs` x `ins`."""
    row, column = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
    total, mask = corner + row * stride + column, (row < outs) & (column < ins)
    tl.store(total, tl.load(total, mask) + acc, mask)
