"""The fused RMSNorm and LayerNorm against formulas in double precision."""

import pytest
import torch

EPS = 1e-3


def formula(x, weight, zero_centred):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (weight + 1 if zero_centred else weight)


def test_a_frozen_weight(device):
    from megaswift.bridge.kernels.norm import rms_norm

    torch.manual_seed(0)
    x, weight, slopes = (torch.randn(*size, device=device) for size in ((70, 48), (48,), (70, 48)))
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    rms_norm(x, weight, EPS).backward(slopes)
    formula(exact, weight.double(), False).backward(slopes.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(
    "shape", [(70, 1, 128), (9, 3, 2, 40), (3, 5000), (0, 64)], ids=["rows", "views of heads", "wide", "none"]
)
def test_agrees_with_the_formula(device, shape, zero_centred, beside):
    from megaswift.bridge.kernels.norm import rms_norm, rms_norm_with_residual

    torch.manual_seed(0)
    wide = torch.randn(*shape[:-2], shape[-2] + 2, shape[-1], device=device) * 3
    weight = torch.randn(shape[-1], device=device)
    gradients = torch.randn(2, *shape, device=device)
    results = []
    for dtype in (torch.float32, torch.float64):
        x, factor = (tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in (wide, weight))
        given = gradients.to(dtype)
        view = x[..., 1:-1, :]
        if dtype == torch.float64:
            made = formula(view, factor, zero_centred), view
        elif beside:
            made = rms_norm_with_residual(view, factor, EPS, zero_centred=zero_centred)
        else:
            made = rms_norm(view, factor, EPS, zero_centred=zero_centred), view
        ((made[0] * given[0]).sum() + (made[1] * given[1]).sum() * beside).backward()
        results.append((made[0].detach(), made[1].detach(), x.grad, factor.grad))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(70, 72), (5, 3, 1152), (3, 5000), (0, 64)], ids=["rows", "planes", "wide", "none"])
def test_layer_norm_agrees_with_torch(device, shape, has_bias, zero_centred, has_residual):
    from megaswift.bridge.kernels.norm import layer_norm, layer_norm_with_residual

    torch.manual_seed(0)
    size = shape[-1:]
    inputs = [torch.randn(*shape, device=device) * 3 + 7, *(torch.randn(*size, device=device) for _ in range(2))]
    slopes = torch.randn(2, *shape, device=device)
    results = []
    for dtype in (torch.float32, torch.float64):
        x, weight, bias = (tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs)
        shift = bias if has_bias else None
        if dtype == torch.float64:
            output, residual = torch.nn.functional.layer_norm(x, size, weight + zero_centred, shift, EPS), x
        elif has_residual:
            output, residual = layer_norm_with_residual(x, weight, shift, EPS, zero_centred=zero_centred)
        else:
            output, residual = layer_norm(x, weight, shift, EPS, zero_centred=zero_centred), x
        ((output * slopes[0]).sum() + (residual * slopes[1]).sum() * has_residual).backward()
        results.append((output.detach(), x.grad, weight.grad, *([bias.grad] if has_bias else [])))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=5e-5)


def test_a_frozen_layer_norm(device):
    from megaswift.bridge.kernels.norm import layer_norm

    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 40, device=device), *torch.randn(2, 40, device=device)
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    layer_norm(x, weight, bias, EPS).sum().backward()
    torch.nn.functional.layer_norm(exact, (40,), weight.double(), bias.double(), EPS).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=2e-5)
