"""Fused AdamW for a list of tensors in one launch, and the norm of a list of gradients.

The kernels read the tensors' addresses from a table, so that hundreds of tensors need one launch. An update reads and
writes each number once: 30 bytes per parameter, including its copy in half precision.
"""
# Calls of kernels:
# pyright: reportArgumentType=false

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

LAUNCH: LaunchArgs = {"BLOCK": 4096, "num_warps": 8}  # elements per program

TensorRow = Sequence[Tensor | None]  # tensors of equal length, such as a parameter and its states


class AddressTable:
    """Table of the addresses of rows of tensors, on the device; rebuilt only if an address changed."""

    def __init__(self):
        self._entries: list[tuple[int, ...]] = []

    def update(self, rows: Sequence[TensorRow]) -> None:
        """Set the rows: contiguous tensors, the first of each row not None, with at least one element in total."""
        entries = [(*(0 if tensor is None else tensor.data_ptr() for tensor in row), row[0].numel()) for row in rows]  # type: ignore[union-attr]
        if entries == self._entries:
            return
        self._entries, device = entries, rows[0][0].device  # type: ignore[union-attr]
        table = np.array(entries, np.int64)
        blocks = -(-table[:, -1] // LAUNCH["BLOCK"])
        first_blocks = np.repeat(blocks.cumsum() - blocks, blocks)
        places = np.stack(
            (np.repeat(np.arange(len(rows)), blocks), np.arange(len(first_blocks)) - first_blocks), axis=1
        )
        self.rows = _to_device(
            torch.from_numpy(table), device
        )  # [rows, tensors + 1]: addresses (0: None), then the number of elements
        self.places = _to_device(
            torch.from_numpy(places.astype(np.int32)), device
        )  # [programs, 2]: row, and block of that row
        self.aligned = not (table % 16).any()


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def adamw(
    table: AddressTable,
    copy_dtype: torch.dtype,
    *,
    grad_scale: Tensor,
    found_inf: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Do one step of AdamW (https://arxiv.org/abs/1711.05101).

    table: rows of fp32 parameter, gradient, mean, variance, and the parameter's copy in `copy_dtype`, or None
    grad_scale: divisor of the gradients, which are not modified
    found_inf: nothing changes unless this is 0
    step: counted from 1
    """
    beta1, beta2 = betas
    _adamw[(len(table.places),)](
        table.rows,
        table.places,
        grad_scale,
        found_inf,
        lr * weight_decay,
        lr / (1 - beta1**step),
        (1 - beta2**step) ** 0.5,
        1 - beta1,
        1 - beta2,
        eps,
        **{"HALF": tl.float16 if copy_dtype == torch.float16 else tl.bfloat16, "ALIGNED": table.aligned, **LAUNCH},
    )


@triton.jit
def _adamw(
    rows, places, grad_scale, found_inf, decay, rate, correction, share1, share2, eps,
    HALF: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        place = places + 2 * tl.program_id(0)
        row = rows + 6 * tl.load(place)
        start = tl.load(place + 1).to(tl.int64) * BLOCK
        inside = start + tl.arange(0, BLOCK) < _length(row + 5, ALIGNED)
        parameters = _tensor(row, tl.float32, ALIGNED) + start + tl.arange(0, BLOCK)
        gradients = _tensor(row + 1, tl.float32, ALIGNED) + start + tl.arange(0, BLOCK)
        means = _tensor(row + 2, tl.float32, ALIGNED) + start + tl.arange(0, BLOCK)
        variances = _tensor(row + 3, tl.float32, ALIGNED) + start + tl.arange(0, BLOCK)

        gradient = tl.load(gradients, mask=inside) / tl.load(grad_scale)
        mean = tl.load(means, mask=inside)
        mean += (gradient - mean) * share1
        variance = tl.load(variances, mask=inside)
        variance += (gradient * gradient - variance) * share2
        change = tl.div_rn(mean, tl.sqrt_rn(variance) / correction + eps)
        parameter = tl.load(parameters, mask=inside)
        parameter -= parameter * decay + change * rate  # a factor 1 - decay would lose most digits of a small decay

        tl.store(parameters, parameter, mask=inside)
        tl.store(means, mean, mask=inside)
        tl.store(variances, variance, mask=inside)
        if tl.load(row + 4) != 0:
            copies = _tensor(row + 4, HALF, ALIGNED) + start + tl.arange(0, BLOCK)
            tl.store(copies, parameter.to(HALF), mask=inside)


def sum_of_squares(table: AddressTable) -> Tensor:
    """Return the sum of squares of all elements, fp32 []; each row has one fp32 tensor."""
    parts = torch.empty(len(table.places), dtype=torch.float32, device=table.places.device)
    _squares[(len(parts),)](table.rows, table.places, parts, **{"ALIGNED": table.aligned, **LAUNCH})
    return parts.sum()


@triton.jit
def _squares(rows, places, parts, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    place = places + 2 * tl.program_id(0)
    row = rows + 2 * tl.load(place)
    start = tl.load(place + 1).to(tl.int64) * BLOCK
    inside = start + tl.arange(0, BLOCK) < _length(row + 1, ALIGNED)
    x = tl.load(_tensor(row, tl.float32, ALIGNED) + start + tl.arange(0, BLOCK), mask=inside, other=0.0)
    tl.store(parts + tl.program_id(0), tl.sum(x * x))


@triton.jit
def _tensor(cell, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(cell).to(tl.pointer_type(dtype))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _length(cell, ALIGNED: tl.constexpr):
    length = tl.load(cell)
    if ALIGNED:
        length = tl.multiple_of(length, 16)
    return length
