"""The fused RMSNorm against the formula in double precision."""

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
