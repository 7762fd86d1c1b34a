"""Sums of partial gradients, added to `main_grad`, against torch in fp64."""

import pytest
import torch


@pytest.mark.parametrize("number", [1, 70, 600])
@pytest.mark.parametrize("has_main_grad", [False, True])
def test_parts_of_a_gradient(has_main_grad, number, device):
    from megaswift.bridge.kernels.partial_sums import sum_parts

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(40, device=device))
    parts = torch.randn(number, 2, 40, device=device)[:, 1:]  # rows with others between them
    before = torch.randn(40, device=device)
    if has_main_grad:
        weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
    (grad,) = sum_parts((weight,), parts)
    if has_main_grad:
        assert weight.grad_added_to_main_grad
        grad = weight.main_grad - before
    torch.testing.assert_close(grad.double(), parts[:, 0].double().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("with_main_grads", [(True, True), (True, False), (False, True)])
def test_two_weights_get_their_own_parts(with_main_grads, device):
    from megaswift.bridge.kernels.partial_sums import sum_parts

    torch.manual_seed(0)
    parts = torch.randn(70, 2, 40, device=device)
    weights = [torch.nn.Parameter(torch.randn(40, device=device)) for _ in range(2)]
    before = torch.randn(2, 40, device=device)
    for weight, is_first, total in zip(weights, with_main_grads, before, strict=True):
        if is_first:
            weight.main_grad = total.clone()
    grads = sum_parts(weights, parts)
    for number, has_main_grad in enumerate(with_main_grads):
        grad = weights[number].main_grad - before[number] if has_main_grad else grads[number]
        torch.testing.assert_close(grad.double(), parts[:, number].double().sum(0), rtol=1e-5, atol=1e-4)


def with_main_grad(*shape, device) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(*shape, device=device))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(*shape, device=device), False
    return weight


def test_each_parameter_of_a_layer_norm_gets_its_own(device):
    from megaswift.bridge.kernels.norm import layer_norm

    torch.manual_seed(0)
    x, slopes = torch.randn(2, 70, 40, device=device)
    weight, bias = (with_main_grad(40, device=device) for _ in range(2))
    layer_norm(x, weight, bias, 1e-5).backward(slopes)
    exact = [tensor.detach().double().requires_grad_() for tensor in (weight, bias)]
    torch.nn.functional.layer_norm(x.double(), (40,), *exact, 1e-5).backward(slopes.double())
    for parameter, reference in zip((weight, bias), exact, strict=True):
        torch.testing.assert_close(parameter.main_grad.double(), reference.grad, rtol=1e-5, atol=5e-5)


def test_each_norm_of_heads_gets_its_own(device):
    from megaswift.bridge.kernels.qkv import HeadLayout, split_heads

    torch.manual_seed(0)
    qkv = torch.randn(70, 1, 2 * 5 * 16, device=device)
    weights = [with_main_grad(16, device=device) for _ in range(2)]
    query, key, *_ = split_heads(qkv, (weights[0], weights[1]), None, HeadLayout(2, queries=3, dim=16, eps=1e-5))
    slopes = torch.randn_like(query), torch.randn_like(key)
    torch.autograd.backward((query, key), slopes)
    grouped = qkv.double().unflatten(-1, (2, 5, 16))
    for heads, weight, slope in zip((grouped[..., :3, :], grouped[..., 3:4, :]), weights, slopes, strict=True):
        exact = weight.detach().double().requires_grad_()
        torch.nn.functional.rms_norm(heads.flatten(2, 3), (16,), exact, 1e-5).backward(slope.double())
        torch.testing.assert_close(weight.main_grad.double(), exact.grad, rtol=1e-5, atol=5e-5)
