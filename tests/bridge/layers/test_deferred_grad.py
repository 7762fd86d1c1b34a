"""Gradients of tensors that later layers share, with layers computed again and without."""

import pytest
import torch
from megaswift.bridge.layers.deferred_grad import add_shared_grad, shared_leaf
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("recomputed", [(), (0, 1, 2), (0,), (1, 2)])
def test_gradients_are_those_of_one_graph(recomputed):
    """Layer 0 makes a tensor, which layers 1 and 2 multiply their inputs by."""
    weights = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def gradients(*, shares: bool) -> torch.Tensor:
        leaves, made = [weight.clone().requires_grad_() for weight in weights], []

        def first(x: torch.Tensor) -> torch.Tensor:
            vector = (leaves[0] * x).tanh()
            if not shares:
                made.append(vector)
                return x * vector
            if not made:  # as in the first pass of a recomputed layer
                made.append(shared_leaf(vector))
            return x * add_shared_grad(vector, vector, made[0])

        def later(number: int):
            return lambda x: (x * leaves[number] * made[0]).sin()

        x = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
        for number, layer in enumerate([first, later(1), later(2)]):
            x = checkpoint(layer, x, use_reentrant=True) if shares and number in recomputed else layer(x)
        x.sum().backward()
        return torch.stack([leaf.grad for leaf in leaves])

    torch.testing.assert_close(gradients(shares=True), gradients(shares=False))
