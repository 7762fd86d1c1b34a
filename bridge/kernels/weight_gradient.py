"""Weight gradients that are added to megatron-core's fp32 sum, `main_grad`, inside the matrix product.

The protocol is megatron-core's (tensor_parallel/layers.py, and the hook in distributed/distributed_data_parallel.py):
the parameter is marked by `grad_added_to_main_grad`, and autograd gets a gradient whose values nobody reads, so that
the hook runs where it would have run.
"""

import torch
from torch import Tensor


def has_main_grad(weight: Tensor) -> bool:
    """Return whether `weight` has an fp32 `main_grad`, which megatron-core's DistributedDataParallel sets."""
    total = getattr(weight, "main_grad", None)
    return total is not None and total.dtype == torch.float32


def accumulate_product(total: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
    """total += grad_output^T @ inputs, where nothing is rounded to the inputs' type on the way.

    total [out, in], in fp32 or in the inputs' type; grad_output [rows, out] and inputs [rows, in], both of one type.
    """
    if total.dtype == inputs.dtype:
        total.addmm_(grad_output.t(), inputs)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, grad_output.t(), inputs, total.dtype, out=total)
    else:
        total.addmm_(grad_output.t().to(total.dtype), inputs.to(total.dtype))


def mark_grad_added(weight: Tensor) -> Tensor | None:
    """Mark that all of the gradient is in `main_grad`. Return what the backward pass returns for `weight`."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        # The matrix is the embedding's as well: the hook adds the sum that autograd made of both gradients, and it runs
        # by the embedding's.
        return None
    # The weight itself stands in, which takes no memory: autograd keeps it as `grad`, uncopied, until the hook drops
    # it. Were there a `grad` already, it would be added to.
    return weight.detach() if weight.grad is None else torch.zeros_like(weight)


def accumulate(weight: Tensor, grad_output: Tensor, inputs: Tensor) -> Tensor | None:
    """Add grad_output^T @ inputs to `weight.main_grad`; returns what a backward pass then returns for `weight`.

    weight [out, in] with `has_sum`; grad_output [rows, out]; inputs [rows, in].
    """
    accumulate_product(weight.main_grad, grad_output, inputs)  # type: ignore[attr-defined]
    return mark_grad_added(weight)
