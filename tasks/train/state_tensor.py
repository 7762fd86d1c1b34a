"""State of an optimizer in narrow types: bf16, fp16 and FP8 with a scale per block of values, or beside a bf16 copy.

A scale is a power of two, so that values that were read and are written again stay the same: a resume is exact.

An fp32 value whose bf16 copy is at hand needs only 16 bits more: the distance of its bits from the copy's, at most 2^15
in magnitude. A distance of 2^15 does not fit into int16 and becomes 2^15 - 1, which has the same bf16 copy: an error of
one unit in the last of 24 binary places, once in 2^17 values.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale
STATE_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
# Largest value of a scaled type as (mantissa, exponent) of frexp, and its smallest positive value.
_LARGEST = {torch.float16: (0.5, 16), torch.float8_e4m3fn: (0.875, 9)}
_SMALLEST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}
# The square of the smallest value is then a normal fp32 number in either type, and so is each scale's inverse.
MIN_EXPONENT, MAX_EXPONENT = -38, 100


class StateTensor(NamedTuple):
    """Flat tensor in fp32, bf16, a scaled type, or as int16 distances from a bf16 copy.

    Arguments:
        values: [elements]
        exponents: int8 [blocks], binary logarithms of the blocks' scales; None: not scaled
        is_root: store square roots, whose range is half as wide; positive values never become 0
        copy: bf16 [elements], the state rounded to nearest even, on any device; `write` writes it too
    """

    values: Tensor
    exponents: Tensor | None = None
    is_root: bool = False
    copy: Tensor | None = None

    @classmethod
    def zeros(
        cls, size: int, dtype: torch.dtype, make: Callable[[int, torch.dtype], Tensor], *, is_root: bool = False
    ) -> "StateTensor":
        """Return zeros, from `make(size, dtype)`. is_root: store square roots if the type is scaled."""
        if dtype not in _LARGEST:
            return cls(make(size, dtype))
        return cls(make(size, dtype), make(-(-size // BLOCK), torch.int8), is_root)

    @property
    def is_scaled(self) -> bool:
        return self.exponents is not None

    @property
    def is_encoded(self) -> bool:
        """Return whether `values` are not the state's values in another precision."""
        return self.is_scaled or self.copy is not None

    def part(self, start: int, stop: int) -> "StateTensor":
        """Return a view of elements. start: a multiple of BLOCK"""
        exponents = None if self.exponents is None else self.exponents[start // BLOCK : -(-stop // BLOCK)]
        copy = None if self.copy is None else self.copy[start:stop]
        return StateTensor(self.values[start:stop], exponents, self.is_root, copy)

    def read(self, target: Tensor) -> None:
        """Copy the values into `target`, fp32 [elements]."""
        if self.copy is not None:
            target.copy_(self.copy)
            target.view(torch.int32).add_(self.values.to(target.device))
            return
        target.copy_(self.values)
        if self.exponents is None:
            return
        for block, exponents in _blocks(target, self.exponents):
            block.mul_(_powers_of_two(exponents))
        if self.is_root:
            target.square_()

    def write(self, source: Tensor) -> None:
        """Store the values of `source`, fp32 [elements], rounded to nearest even."""
        if self.copy is not None:
            self.copy.copy_(source.bfloat16())
            distances = source.view(torch.int32) - source.bfloat16().float().view(torch.int32)
            self.values.copy_(distances.clamp_(max=2**15 - 1))
            return
        if self.exponents is None:
            self.values.copy_(source)
            return
        dtype = self.values.dtype
        source = source.sqrt() if self.is_root else source.clone()
        for block, exponents in _blocks(source, self.exponents):
            exponents.copy_(_exponents(block, dtype))
            block.mul_(_powers_of_two(-exponents))
        if self.is_root:
            source = torch.where(source > 0, source.clamp(min=_SMALLEST[dtype]), source)
        self.values.copy_(source)


def _blocks(flat: Tensor, exponents: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the full blocks of a flat tensor with their exponents, and the last block if it is shorter."""
    blocks = len(flat) // BLOCK
    full = flat[: blocks * BLOCK].view(blocks, BLOCK), exponents[:blocks, None]
    rest = flat[None, blocks * BLOCK :], exponents[blocks:, None]
    return [part for part in (full, rest) if part[0].numel()]


def _exponents(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the least exponents with which the values of each block fit into the type: int8 [blocks, 1]."""
    largest_mantissa, largest_exponent = _LARGEST[dtype]
    mantissas, exponents = torch.frexp(blocks.abs().amax(1, keepdim=True))
    exponents = exponents - largest_exponent + (mantissas > largest_mantissa).int()
    return exponents.clamp(MIN_EXPONENT, MAX_EXPONENT).to(torch.int8)


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^exponents, fp32, exactly: torch.ldexp computes them by pow."""
    return ((exponents.int() + 127) << 23).view(torch.float32)
