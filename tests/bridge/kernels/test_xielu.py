"""The fused xIELU against transformers' in double precision."""

import pytest
import torch


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 2100), (37,), (0, 8)])
def test_agrees_with_transformers(device, shape, is_frozen):
    from megaswift.bridge.kernels.xielu import xielu
    from transformers.activations import XIELUActivation

    torch.manual_seed(0)
    exact = XIELUActivation(1.3, 0.9, beta=0.4, eps=-0.3, dtype=torch.float64).to(device)
    x, slopes = torch.randn(2, *shape, dtype=torch.float64, device=device)
    expected = x.clone().requires_grad_()
    exact._xielu_python(expected).backward(slopes)

    alphas = [exact.alpha_p.detach().float(), exact.alpha_n.detach().float()]
    alphas = [alpha.requires_grad_(not is_frozen) for alpha in alphas]
    beta, eps = (number.float().view(1) for number in (exact.beta, exact.eps))
    softplus = torch.nn.functional.softplus
    mine = x.float().requires_grad_()
    output = xielu(mine, torch.cat((softplus(alphas[0]), beta + softplus(alphas[1]), beta, eps)))
    output.backward(slopes.float())
    pairs = [(output, exact._xielu_python(x)), (mine.grad, expected.grad)]
    if not is_frozen:
        pairs += [(alphas[0].grad, exact.alpha_p.grad), (alphas[1].grad, exact.alpha_n.grad)]
    for found, reference in pairs:
        torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-5)
