"""Logits of the fused kernels: products with an output matrix in the weights' dtype, and how many are kept."""
# Functions that return in both branches of an `if` at compile time:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections import deque
from typing import ClassVar, NamedTuple
from weakref import WeakSet

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs


class LogitForm(NamedTuple):
    """Logits of a call in terms of the products with the output matrix."""

    first: int  # label of the first column
    columns: int  # number of real columns
    scale: float  # factor of the logits
    cap: float | None = None  # a product x is cap * tanh(x / cap) before the factor


@triton.jit
def capped(x, CAP: tl.constexpr):
    """Return cap * tanh(x / cap) and its derivative; without a cap, x and 1."""
    if CAP is None:
        return x, 1.0
    else:
        bent = 2 * tl.sigmoid(2 / CAP * x) - 1  # tanh, which Triton's interpreter has not
        return CAP * bent, 1 - bent * bent


def column_blocks(width: int) -> LaunchArgs:
    """Return the columns per iteration of a program, and its warps."""
    block = min(4096, int(triton.next_power_of_2(width)))
    return {"BLOCK": block, "num_warps": max(1, block // 1024)}


def form_logits(hidden: Tensor, weight: Tensor, columns: int) -> Tensor:
    """Return logits [tokens, columns + padding]: rows are aligned to 128 bytes or more; padding is undefined."""
    logits = hidden.new_empty(len(hidden), -(-columns // 64) * 64)
    torch.mm(hidden, weight[:columns].t(), out=logits[:, :columns])
    return logits


class KeptLogits:
    """Logits of a call's first chunks, of one model or several, kept from its forward pass for its backward pass."""

    instances: ClassVar[WeakSet["KeptLogits"]] = WeakSet()  # in this process, which has one device

    def __init__(self):
        self.chunks: deque[tuple[Tensor, ...]] = deque()
        KeptLogits.instances.add(self)

    def try_keep(self, *logits: Tensor) -> bool:
        """Keep the logits if there is memory left beside those of other pending calls. Return whether they are kept."""
        free_bytes = max_kept_bytes(logits[0].device) - sum(kept.nbytes for kept in KeptLogits.instances)
        is_kept = sum(values.nbytes for values in logits) <= free_bytes
        if is_kept:
            self.chunks.append(logits)
        return is_kept

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for chunk in self.chunks for values in chunk)


def max_kept_bytes(device: torch.device) -> int:
    """Return the limit of kept logits in bytes: a sixteenth of the device's memory, however much of it is free."""
    return torch.cuda.get_device_properties(device).total_memory // 16 if device.type == "cuda" else 2**30
