"""The fused SwiGLU against the formula in double precision."""

import pytest
import torch

GPT_OSS = {"slope": 1.702, "limit": 0.7, "offset": 1.0}


def formula(x, weights, slope=1.0, limit=None, offset=0.0):
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    made = gate * torch.sigmoid(slope * gate) * (up + offset)
    return made if weights is None else made * weights.unsqueeze(-1)


@pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "width"), [((37,), 200), ((3, 2), 1536), ((0,), 128), ((5,), 40)])
def test_agrees_with_the_formula(device, rows, width, weighted, form):
    from megaswift.bridge.kernels.swiglu import swiglu

    torch.manual_seed(0)
    x = torch.randn(*rows, 2 * width + 8, device=device)[..., 8:]  # a view
    weights = torch.rand(rows, device=device) if weighted else None
    gradient = torch.randn(*rows, width, device=device)
    results = []
    for function, dtype in ((swiglu, torch.float32), (formula, torch.float64)):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (x, weights) if leaf is not None]
        given = leaves[0] if dtype == torch.float64 else torch.nn.functional.pad(leaves[0], (8, 0))[..., 8:]
        made = function(given, *leaves[1:], **form) if weighted else function(given, None, **form)
        made.backward(gradient.to(dtype))
        results.append([made.detach(), *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*results, strict=True):
        assert ours.shape == exact.shape
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_rows_weights_without_a_gradient(device):
    from megaswift.bridge.kernels.swiglu import swiglu

    torch.manual_seed(0)
    x, weights, slopes = (torch.randn(*size, device=device) for size in ((9, 3072), (9,), (9, 1536)))
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    swiglu(x, weights).backward(slopes)
    formula(exact, weights.double()).backward(slopes.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_what_is_no_number_stays_so(device):
    from megaswift.bridge.kernels.swiglu import swiglu

    x = torch.full((1, 4), float("nan"), device=device)
    assert swiglu(x, **GPT_OSS).isnan().all()


@pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("weighted", [False, True])
def test_biases_of_experts(device, weighted, form):
    from megaswift.bridge.kernels.expert_bias import add_expert_bias
    from megaswift.bridge.kernels.swiglu import swiglu

    torch.manual_seed(0)
    counts, width = [3, 0, 7, 1], 1160
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    x, weights = torch.randn(11, 2 * width, device=device), torch.rand(11, device=device)
    first, second = torch.randn(4, 2 * width, device=device), torch.randn(4, width, device=device)
    slopes = torch.randn(11, width, device=device)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, first, second, weights)]
    row_weights = leaves[3] if weighted else None
    output = add_expert_bias(
        swiglu(leaves[0], row_weights, bias=(leaves[1], ends), **form), leaves[2], ends, row_weights
    )
    output.backward(slopes)
    exact = [tensor.double().requires_grad_() for tensor in (x, first, second, weights)]
    rows = torch.repeat_interleave(torch.arange(4, device=device), torch.tensor(counts, device=device))
    scale = exact[3] if weighted else None
    expected = formula(exact[0] + exact[1][rows], scale, **form)
    expected = expected + (exact[2][rows] if scale is None else exact[2][rows] * scale.unsqueeze(1))
    expected.backward(slopes.double())
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(leaves[: 3 + weighted], exact, strict=False):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=2e-5)
    assert weighted or leaves[3].grad is None


@pytest.mark.gpu
def test_biases_of_experts_in_bf16():
    """The sums of a bias's gradient keep 16 bits of the rows' weights."""
    from megaswift.bridge.kernels.expert_bias import expert_sums

    torch.manual_seed(0)
    rows, weights = torch.randn(4000, 2880, device="cuda", dtype=torch.bfloat16), torch.rand(4000, device="cuda")
    ends = torch.tensor([100, 100, 4000], device="cuda", dtype=torch.int32)
    exact = torch.zeros(3, 2880, device="cuda", dtype=torch.float64)
    experts = torch.searchsorted(ends, torch.arange(4000, device="cuda"), right=True)
    exact.index_add_(0, experts, rows.double() * weights.double().unsqueeze(1))
    # The two parts are bf16 sums.
    torch.testing.assert_close(expert_sums(rows, ends, weights).double(), exact, rtol=2**-8, atol=0.02)
