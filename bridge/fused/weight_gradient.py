"""Weight gradients that are added to megatron-core's fp32 sum, `main_grad`, inside the matrix product.

The protocol is megatron-core's (tensor_parallel/layers.py, and the hook of distributed/distributed_data_parallel.py): the
parameter is marked by `grad_added_to_main_grad`, and autograd gets a gradient of the right shape and unread values, by
which the hook runs where it would have run.
"""

import torch
from torch import Tensor


def has_sum(weight: Tensor) -> bool:
    """Whether `weight` has an fp32 `main_grad`, which megatron-core's DistributedDataParallel gives it."""
    total = getattr(weight, "main_grad", None)
    return total is not None and total.dtype == torch.float32


def add_product(total: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
    """total += grad_output^T @ inputs, where nothing is rounded to the inputs' type on the way.

    total [out, in] fp32; grad_output [rows, out] and inputs [rows, in], both of one type.
    """
    if not inputs.is_cuda:
        total.addmm_(grad_output.t().float(), inputs.float())
    elif inputs.dtype == torch.float32:
        total.addmm_(grad_output.t(), inputs)
    else:
        torch.ops.aten.addmm.dtype_out(total, grad_output.t(), inputs, torch.float32, out=total)


def added(weight: Tensor) -> Tensor | None:
    """What a backward pass returns for `weight` once all of its gradient is in `main_grad`."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # A matrix that is the embedding's as well has `zero_out_wgrad`: the hook adds the sum that autograd made of both
    # gradients, and it runs by the embedding's.
    return None if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def accumulate(weight: Tensor, grad_output: Tensor, inputs: Tensor) -> Tensor | None:
    """Add grad_output^T @ inputs to `weight.main_grad`; returns what a backward pass then returns for `weight`.

    weight [out, in] with `has_sum`; grad_output [rows, out]; inputs [rows, in].
    """
    add_product(weight.main_grad, grad_output, inputs)  # type: ignore[attr-defined]
    return added(weight)
