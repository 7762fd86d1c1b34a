"""Fused xIELU (https://arxiv.org/abs/2411.13010), forward and backward, with gradients of its two learned numbers."""
# Calls of kernels:
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements per program
WARPS = 8


def xielu(x: Tensor, coefficients: Tensor) -> Tensor:
    """Return p x^2 + b x where x > 0, else n (exp(min(x, e)) - 1 - x) + b x, computed in fp32.

    coefficients: fp32 [4]: p, n, b and e; the last two have no gradients.
    """
    return cast(Tensor, _XIELU.apply(x.contiguous(), coefficients))


class _XIELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, coefficients: Tensor) -> Tensor:
        output = torch.empty_like(x)
        if x.numel():
            _forward[(-(-x.numel() // BLOCK),)](x, coefficients, output, x.numel(), BLOCK, num_warps=WARPS)
        ctx.save_for_backward(x, coefficients)
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, coefficients = ctx.saved_tensors
        grad_x, programs = torch.empty_like(x), -(-x.numel() // BLOCK)
        # A sum per program, added up in a fixed order.
        parts = torch.zeros(programs, 2, dtype=torch.float32, device=x.device) if ctx.needs_input_grad[1] else None
        if programs:
            _backward[(programs,)](grad.contiguous(), x, coefficients, grad_x, parts, x.numel(), BLOCK, num_warps=WARPS)
        return grad_x, None if parts is None else torch.nn.functional.pad(parts.sum(0), (0, 2))


@triton.jit(do_not_specialize=["size"])
def _forward(x, coefficients, output, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < size, other=0.0).to(tl.float32)
    positive, negative = tl.load(coefficients), tl.load(coefficients + 1)
    linear, limit = tl.load(coefficients + 2), tl.load(coefficients + 3)
    bent = tl.exp(tl.minimum(value, limit)) - 1 - value
    result = tl.where(value > 0, positive * value * value, negative * bent) + linear * value
    tl.store(output + at, result.to(output.dtype.element_ty), at < size)


@triton.jit(do_not_specialize=["size"])
def _backward(grad, x, coefficients, grad_x, parts, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < size, other=0.0).to(tl.float32)
    slope = tl.load(grad + at, at < size, other=0.0).to(tl.float32)
    positive, negative = tl.load(coefficients), tl.load(coefficients + 1)
    linear, limit = tl.load(coefficients + 2), tl.load(coefficients + 3)
    power = tl.exp(tl.minimum(value, limit))
    inner = tl.where(value > 0, 2 * positive * value, negative * (tl.where(value < limit, power, 0.0) - 1)) + linear
    tl.store(grad_x + at, (slope * inner).to(grad_x.dtype.element_ty), at < size)
    if parts is not None:
        tl.store(parts + tl.program_id(0) * 2, tl.sum(tl.where(value > 0, slope * value * value, 0.0), 0))
        tl.store(parts + tl.program_id(0) * 2 + 1, tl.sum(tl.where(value > 0, 0.0, slope * (power - 1 - value)), 0))
