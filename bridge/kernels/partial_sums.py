"""Gradient of a small weight, from the partial sums that the programs of a backward kernel write."""

from typing import Any, cast

import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs
from .weight_gradient import has_main_grad, mark_grad_added

COLUMNS = 16
MANY_PARTS = 512


def sum_parts(weight: Tensor, parts: Tensor) -> Tensor | None:
    """Return what the backward pass must return for `weight` [size], whose gradient is the sum of parts [n, size].

    If the weight has an fp32 `main_grad`, the sum is added to it in one kernel, without rounding.
    """
    if not has_main_grad(weight):
        return parts.sum(0).to(weight.dtype)
    blocks: LaunchArgs = {"ROWS": 256 if len(parts) > MANY_PARTS else 64, "COLUMNS": COLUMNS}
    total, size = cast(Any, weight).main_grad, parts.shape[1]
    _add_sums[(triton.cdiv(size, COLUMNS),)](total, parts, len(parts), parts.stride(0), size, **blocks)
    return mark_grad_added(weight)


@triton.jit(do_not_specialize=["parts_number"])
def _add_sums(total, parts, parts_number, stride, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """total += the sum of parts [parts_number, size], whose rows are `stride` elements apart."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, parts_number, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        sums += tl.load(parts + row * stride + column, (row < parts_number) & (column < size), other=0.0)
    more = tl.sum(sums, 0, keep_dims=True)
    tl.store(total + column, tl.load(total + column, column < size) + more, column < size)
