"""Tensors that later layers share, whose gradients wait for the layer that made them.

A recomputed layer runs its own backward pass, which must not enter the graph behind a tensor of another layer. So later
layers get a leaf with the tensor's values. Its `grad` is complete before the backward pass of the layer that made it.
"""

from typing import Any

import torch
from torch import Tensor


def shared_leaf(x: Tensor) -> Tensor:
    """Return a leaf of x for later layers."""
    # The first pass of a recomputed layer has no gradients, and x may need one all the same.
    return x.detach().requires_grad_(x.requires_grad or not torch.is_grad_enabled())


def add_shared_grad(x: Tensor, source: Tensor, leaf: Tensor) -> Tensor:
    """Return x, whose backward pass gives `source` the gradient of its `leaf`.

    x: any tensor whose backward pass comes after those of all users of the leaf; it can be `source` itself
    """
    # In a tuple, since autograd would complete the gradient of an argument only after this backward pass.
    return _SharedGrad.apply(x, source, (leaf,))  # pyright: ignore[reportReturnType]


class _SharedGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, leaves: tuple[Tensor]) -> Tensor:
        [ctx.leaf] = leaves
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        leaf, ctx.leaf = ctx.leaf, None
        grad, leaf.grad = leaf.grad, None
        return grads[0], grad, None
