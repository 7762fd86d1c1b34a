"""Weight gradients of grouped products, added to fp32 sums, against a loop in double precision."""

import pytest
import torch

COUNTS = {"uneven": [64, 1, 3, 70], "none for some": [5, 0, 11, 0], "all for one": [0, 0, 150, 0]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("way", ["load", "reduce", "tma", "temporary"])
def test_adds_each_experts_product(device, monkeypatch, counts, way):
    from megaswift.bridge.fused import grouped_gradient

    if device == "cpu" and way in ("tma", "temporary"):
        pytest.skip("Triton's interpreter has no such reduction, and the product is in bf16")
    monkeypatch.setattr(grouped_gradient, "WAY", way)
    torch.manual_seed(0)
    rows, dtype = sum(counts), torch.float32 if device == "cpu" else torch.bfloat16
    grad, x = (torch.randn(rows, size, device=device, dtype=dtype) for size in (136, 200))
    totals = torch.randn(len(counts), 136, 200, device=device)
    parts = zip(totals.double(), grad.double().split(counts), x.double().split(counts), strict=True)
    wanted = torch.stack([total + a.t() @ b for total, a, b in parts])
    grouped_gradient.add_products(totals, grad, x, torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32))
    bound = 0.1 if way == "temporary" else 1e-4
    torch.testing.assert_close(totals.double(), wanted, rtol=1e-4, atol=bound)
