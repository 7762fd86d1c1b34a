"""Products of frozen weights with their adapters equal torch's, forward and backward, and dropout is the kernels'."""

import pytest
import torch
from megaswift.bridge.lora.product import adapted_linear


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    x, weight, a, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 3, 6), (5, 6), (2, 6), (5, 2)))
    return x.requires_grad_(), weight, a.requires_grad_(), b.requires_grad_()


def test_equals_the_sum_of_both_products(inputs):
    x, weight, a, b = inputs
    output, expected = adapted_linear(x, weight, a, b, 3.0, 0.0), x @ weight.t() + 3 * x @ a.t() @ b.t()
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(output)
    for result, reference in zip(*(torch.autograd.grad(y, (x, a, b), grad) for y in (output, expected)), strict=True):
        torch.testing.assert_close(result, reference)


def test_an_input_without_gradient_gets_none(inputs):
    x, weight, a, b = inputs
    adapted_linear(x.detach(), weight, a, b, 3.0, 0.0).sum().backward()
    torch.testing.assert_close(a.grad, 3 * b.sum(0).outer(x.detach().sum((0, 1))))
