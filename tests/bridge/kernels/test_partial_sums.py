"""Sums of partial gradients, added to `main_grad`, against torch in fp64."""

import pytest
import torch


@pytest.mark.parametrize("number", [1, 70, 600])
@pytest.mark.parametrize("has_main_grad", [False, True])
def test_parts_of_a_gradient(has_main_grad, number, device):
    from megaswift.bridge.kernels.partial_sums import sum_parts

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(40, device=device))
    parts = torch.randn(number, 2, 40, device=device)[:, 1]  # rows with others between them
    before = torch.randn(40, device=device)
    if has_main_grad:
        weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
    grad = sum_parts(weight, parts)
    if has_main_grad:
        assert weight.grad_added_to_main_grad
        grad = weight.main_grad - before
    torch.testing.assert_close(grad.double(), parts.double().sum(0), rtol=1e-5, atol=1e-4)
