"""AdamW on a whole list of tensors in one launch, and the norm of a list of gradients.

The kernels find their tensors in a table of addresses: no list of hundreds of tensors is cut into launches of its own.
An update reads and writes each number once, 30 bytes a parameter with its copy in half precision.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

LAUNCH: LaunchArgs = {"BLOCK": 4096, "num_warps": 8}  # elements that a program works on, and by how many warps

TensorRow = Sequence[Tensor | None]  # tensors of one length that belong together


class AddressTable:
    """Addresses of the tensors of some rows, on the device; rebuilt only when one of them has moved."""

    def __init__(self):
        self._known: list[tuple[int, ...]] = []

    def update(self, rows: Sequence[TensorRow]) -> None:
        """The rows' tensors are contiguous, the first one of each is not None; there is at least one element."""
        known = [(*(0 if each is None else each.data_ptr() for each in row), row[0].numel()) for row in rows]  # type: ignore[union-attr]
        if known == self._known:
            return
        self._known, device = known, rows[0][0].device  # type: ignore[union-attr]
        numbers = np.array(known, np.int64)
        blocks = -(-numbers[:, -1] // LAUNCH["BLOCK"])
        first = np.repeat(blocks.cumsum() - blocks, blocks)
        places = np.stack((np.repeat(np.arange(len(rows)), blocks), np.arange(len(first)) - first), axis=1)
        self.rows = _there(torch.from_numpy(numbers), device)  # [rows, tensors + 1]: addresses (0: None), elements
        self.places = _there(torch.from_numpy(places.astype(np.int32)), device)  # [programs, 2]: row, block of it
        self.aligned = not (numbers % 16).any()


def _there(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def adamw(
    table: AddressTable,
    half: torch.dtype,
    *,
    grad_scale: Tensor,
    found_inf: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW (https://arxiv.org/abs/1711.05101) on rows of fp32 parameter, gradient, mean and variance, and
    the parameter's copy in `half` precision, or None. Gradients are divided by `grad_scale` (they stay as they are);
    where `found_inf` is not 0 nothing changes. `step` counts from 1."""
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
        **{"HALF": tl.float16 if half == torch.float16 else tl.bfloat16, "ALIGNED": table.aligned, **LAUNCH},
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
        parameter -= parameter * decay + change * rate  # 1 - decay would lose most of a small one's digits

        tl.store(parameters, parameter, mask=inside)
        tl.store(means, mean, mask=inside)
        tl.store(variances, variance, mask=inside)
        if tl.load(row + 4) != 0:
            copies = _tensor(row + 4, HALF, ALIGNED) + start + tl.arange(0, BLOCK)
            tl.store(copies, parameter.to(HALF), mask=inside)


def sum_of_squares(table: AddressTable) -> Tensor:
    """Return the sum of squares of all elements of rows of one fp32 tensor, fp32 []."""
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
    address = tl.load(cell).to(tl.pointer_type(dtype))  # pyright: ignore[reportArgumentType]
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _length(cell, ALIGNED: tl.constexpr):
    length = tl.load(cell)
    if ALIGNED:
        length = tl.multiple_of(length, 16)
    return length
