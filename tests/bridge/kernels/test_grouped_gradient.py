"""Weight gradients of grouped products, added to fp32 sums, against a loop in double precision."""

import pytest
import torch

COUNTS = {"uneven": [64, 1, 3, 70], "none for some": [5, 0, 11, 0], "all for one": [0, 0, 150, 0]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("engine", [False, True], ids=["loads", "copy engine"])
def test_adds_each_experts_product(device, monkeypatch, counts, engine):
    from megaswift.bridge.kernels import grouped_gradient

    monkeypatch.setattr(grouped_gradient, "_supports_copy_engine", lambda rows: engine)
    torch.manual_seed(0)
    rows, dtype = sum(counts), torch.float32 if device == "cpu" else torch.bfloat16
    grad, x = (torch.randn(rows, size, device=device, dtype=dtype) for size in (136, 200))
    totals = torch.randn(len(counts), 136, 200, device=device)
    parts = zip(totals.double(), grad.double().split(counts), x.double().split(counts), strict=True)
    wanted = torch.stack([total + a.t() @ b for total, a, b in parts])
    grouped_gradient.add_products(totals, grad, x, torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32))
    torch.testing.assert_close(totals.double(), wanted, rtol=1e-4, atol=1e-4)


def test_a_products_gradient_is_in_main_grad_alone(device, monkeypatch):
    from megaswift.bridge.kernels import grouped_gradient
    from megaswift.bridge.layers.experts import _AccumulatingProduct

    def loop(totals, grad, x, ends):
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        for total, a, b in zip(totals, grad.float().split(counts), x.float().split(counts), strict=True):
            total += a.t() @ b

    if device == "cpu":  # Triton's interpreter takes bf16 for integers
        monkeypatch.setattr(grouped_gradient, "add_products", loop)
    torch.manual_seed(0)
    x, slopes = (torch.randn(138, size, device=device, dtype=torch.bfloat16) for size in (200, 136))
    weight = torch.nn.Parameter(torch.randn(4, 136, 200, device=device, dtype=torch.bfloat16))
    ends = torch.tensor(COUNTS["uneven"], device=device).cumsum(0, dtype=torch.int32)
    x.requires_grad_()
    _AccumulatingProduct.apply(x, weight, ends).backward(slopes)
    (wanted_x, x.grad), (wanted, weight.grad) = (x.grad, None), (weight.grad, None)
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape, device=device), False
    seen = []
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
    _AccumulatingProduct.apply(x, weight, ends).backward(slopes)
    assert (seen, weight.grad_added_to_main_grad) == ([True], True)
    assert torch.equal(x.grad, wanted_x)
    torch.testing.assert_close(weight.main_grad - 1, wanted.float(), rtol=1e-2, atol=1e-2)


def test_a_frozen_matrix_keeps_no_rows(device):
    from megaswift.bridge.layers.experts import _AccumulatingProduct

    torch.manual_seed(0)
    x, slopes = (torch.randn(138, size, device=device, dtype=torch.bfloat16) for size in (200, 136))
    weight = torch.randn(4, 136, 200, device=device, dtype=torch.bfloat16)
    ends = torch.tensor(COUNTS["uneven"], device=device).cumsum(0, dtype=torch.int32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor.shape), tensor)[1], lambda t: t):
        made = _AccumulatingProduct.apply(x.requires_grad_(), weight, ends)
    assert x.shape not in kept
    made.backward(slopes)
    parts = zip(slopes.double().split(COUNTS["uneven"]), weight.double(), strict=True)
    torch.testing.assert_close(x.grad.double(), torch.cat([a @ b for a, b in parts]), rtol=2e-2, atol=2e-2)
