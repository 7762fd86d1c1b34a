"""Weight gradients accumulated into megatron-core's fp32 `main_grad` inside the matrix product.

The protocol is megatron-core's (tensor_parallel/layers.py, and the hook in distributed/distributed_data_parallel.py):
`grad_added_to_main_grad` marks the parameter, and autograd gets a dummy gradient, so that the hook runs at the usual
time.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor


def has_main_grad(weight: Tensor) -> bool:
    """Return whether `weight` has an fp32 `main_grad`, which megatron-core's DistributedDataParallel sets."""
    total = getattr(weight, "main_grad", None)
    return total is not None and total.dtype == torch.float32


def needs_grad_in_hook(weight: Tensor) -> bool:
    """Return whether the hook of a weight that the embedding and the output layer share expects a gradient.

    It does if it overlaps reductions (`has_overlapped_reduction`, which train/optimizer.py sets).
    """
    return getattr(weight, "zero_out_wgrad", False) and getattr(weight, "has_overlapped_reduction", False)


def accumulate_product(total: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
    """Compute total += grad_output^T @ inputs, without rounding to the inputs' dtype.

    total [out, in], in fp32 or the inputs' dtype; grad_output [rows, out] and inputs [rows, in], of the same dtype.
    """
    if total.dtype == inputs.dtype:
        total.addmm_(grad_output.t(), inputs)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, grad_output.t(), inputs, total.dtype, out=total)
    else:
        total.addmm_(grad_output.t().to(total.dtype), inputs.to(total.dtype))


def mark_grad_added(weight: Tensor) -> Tensor | None:
    """Mark the full gradient as added to `main_grad`. Return what the backward pass must return for `weight`."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        # The embedding and the output layer share the weight. The hook runs after both. If one did not add its
        # gradient, the hook adds autograd's.
        return None
    # The weight itself is the dummy gradient, which takes no memory: autograd keeps it as `grad`, without a copy, until
    # the hook drops it. An existing `grad` would be added to, so that case needs zeros.
    return weight.detach() if weight.grad is None else torch.zeros_like(weight)


class OutputGradients:
    """Gradients of an output layer's inputs [rows, in] and weight [out, in], added up by chunks of rows.

    columns: number of the weight's first rows that are used
    needs: whether the inputs and the weight need gradients
    accumulates: add the weight's to its `main_grad` if it has one in fp32
    """

    def __init__(self, inputs: Tensor, weight: Tensor, columns: int, needs: Sequence[bool], *, accumulates: bool):
        self._inputs, self._weight, self._used = inputs, weight, weight[:columns]
        self._of_inputs = torch.zeros_like(inputs) if needs[0] else None
        self._accumulates, self._total = accumulates and has_main_grad(weight), None
        if needs[1]:
            main_grad = getattr(weight, "main_grad", None)
            self._total = main_grad if self._accumulates else torch.zeros_like(weight, dtype=torch.float32)

    def add(self, part: slice, slopes: Tensor) -> None:
        """Add a chunk's. slopes [rows of the part, columns]: gradients of the outputs, in the weight's dtype"""
        if self._of_inputs is not None:
            torch.mm(slopes, self._used, out=self._of_inputs[part])
        if self._total is not None:
            accumulate_product(self._total[: len(self._used)], slopes, self._inputs[part])

    def totals(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what the backward pass must return for inputs and weight."""
        if self._total is None:
            return self._of_inputs, None
        if self._accumulates:
            return self._of_inputs, mark_grad_added(self._weight)
        return self._of_inputs, self._total.to(self._weight.dtype)


def accumulate(weight: Tensor, grad_output: Tensor, inputs: Tensor) -> Tensor | None:
    """Add grad_output^T @ inputs to `weight.main_grad`. Return what the backward pass must return for `weight`.

    weight [out, in] with `main_grad`; grad_output [rows, out]; inputs [rows, in].
    """
    accumulate_product(weight.main_grad, grad_output, inputs)  # type: ignore[attr-defined]
    return mark_grad_added(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight^T + bias, whose backward pass accumulates into `weight.main_grad`.

    x [rows, in]; weight [out, in] with `main_grad`; bias [out].
    """
    return cast(Tensor, _Linear.apply(x, weight, bias))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            grad @ weight if needs_x else None,
            accumulate(weight, grad, x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
