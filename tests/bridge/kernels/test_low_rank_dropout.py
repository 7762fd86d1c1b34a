"""Low-rank products with dropout: the mask is random, the same in both passes, and the products are torch's."""

import pytest
import torch

P = 0.3
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(ROUNDING)[: 2 if torch.cuda.is_available() else 1]  # Triton's interpreter has no products in bf16


def mask_of(width: int, keys: torch.Tensor) -> torch.Tensor:
    """The mask that the kernels apply, seen through products of ones and parts of the identity."""
    from megaswift.bridge.kernels.low_rank_dropout import project

    ones, identity = torch.ones(len(keys), width, device=keys.device), torch.eye(width, device=keys.device)
    return torch.cat([project(ones, part, keys, P, 1.0) for part in identity.split(64)], dim=1)


def test_mask_is_random(device):
    from megaswift.bridge.kernels.low_rank_dropout import draw_keys

    torch.manual_seed(0)
    keys, other_keys = (draw_keys(torch.empty(512, 0, device=device)) for _ in range(2))
    first, second = mask_of(256, keys), mask_of(256, other_keys)
    assert set(first.unique().tolist()) == {0.0, 1.0}
    assert first.equal(mask_of(256, keys))
    deviations = 5 * (P * (1 - P) / first.numel()) ** 0.5
    assert first.mean().item() == pytest.approx(1 - P, abs=deviations)
    # Independent of other keys, and of the neighbour in either direction: both kept with the square of 1 - P.
    pairs = (first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first[:, 64:], first[:, :-64])
    for a, b in pairs:
        assert (a * b).mean().item() == pytest.approx((1 - P) ** 2, abs=2 * deviations)
    for dim, size in ((0, 512), (1, 256)):  # no row or column is kept or dropped as a whole
        assert (first.mean(dim) - (1 - P)).abs().max() < 6 * (P * (1 - P) / size) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "rank"), [(150, 200, 5), (2050, 64, 16), (40, 128, 24), (0, 64, 8)])
def test_products_are_of_masked_rows(dtype, rows, width, rank, device):
    from megaswift.bridge.kernels.low_rank_dropout import draw_keys, project, project_backward

    torch.manual_seed(0)
    shapes = (rows, width), (rank, width), (rows, rank)
    x, a, grad = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    keys = draw_keys(x)
    mask = mask_of(width, keys)
    grad_x, grad_a = project_backward(grad, x, a, keys, P, needs_x=True)
    results = project(x, a, keys, P, 2.0), grad_x, grad_a
    masked = x.float() * mask
    expected = 2 * masked @ a.float().t(), mask * (grad.float() @ a.float()), grad.float().t() @ masked
    for result, reference in zip(results, expected, strict=True):
        assert result.dtype == dtype
        assert (result.float() - reference).norm() <= ROUNDING[dtype] * reference.norm()
    assert project_backward(grad, x, a, keys, P, needs_x=False)[0] is None
