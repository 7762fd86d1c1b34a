"""Gradients of small weights, from the partial sums that the programs of a backward kernel write."""

from collections.abc import Sequence
from typing import Any, cast

import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs
from .weight_gradient import has_main_grad, mark_grad_added

COLUMNS = 16
MANY_PARTS = 512


def sum_parts(weights: Sequence[Tensor], parts: Tensor) -> list[Tensor | None]:
    """Return what the backward pass must return for one or two weights [size].

    parts: [n, weights, size], of which the sum over n are the gradients. Those of weights that have an fp32 `main_grad`
    are added to it, without rounding: in one kernel if both have.
    """
    if all(map(has_main_grad, weights)):
        _add([cast(Any, weight).main_grad for weight in weights], parts)
        return [mark_grad_added(weight) for weight in weights]
    grads: list[Tensor | None] = []
    for number, weight in enumerate(weights):
        if has_main_grad(weight):
            grads += sum_parts((weight,), parts[:, number : number + 1])
        else:
            grads.append(parts[:, number].sum(0).to(weight.dtype))
    return grads


def _add(totals: list[Tensor], parts: Tensor) -> None:
    number, weights, size = parts.shape
    blocks: LaunchArgs = {"ROWS": 256 if number > MANY_PARTS else 64, "COLUMNS": COLUMNS}
    strides = parts.stride(0), parts.stride(1)
    _add_sums[-(-size // COLUMNS), weights](totals[0], totals[-1], parts, number, *strides, size, **blocks)


@triton.jit(do_not_specialize=["parts_number"])
def _add_sums(
    first_total, last_total, parts, parts_number, stride, weight_stride, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add the sum of parts [parts_number, weights, size] to the total of each weight."""
    parts += tl.program_id(1) * weight_stride
    total = first_total if tl.program_id(1) == 0 else last_total
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, parts_number, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        sums += tl.load(parts + row * stride + column, (row < parts_number) & (column < size), other=0.0)
    more = tl.sum(sums, 0, keep_dims=True)
    tl.store(total + column, tl.load(total + column, column < size) + more, column < size)
