"""Low-rank products of experts' rows equal torch's products expert by expert."""

import pytest
import torch

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(ROUNDING)[: 2 if torch.cuda.is_available() else 1]  # Triton's interpreter has no products in bf16
COUNTS = {
    "some empty": [70, 0, 129, 1, 0, 64],
    "no rows": [0, 0, 0],
    "one expert": [150],
}


@pytest.fixture(params=COUNTS)
def counts(request) -> list[int]:
    return COUNTS[request.param]


def ends_of(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype
    assert (result.float() - expected).norm() <= ROUNDING[dtype] * expected.norm()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [3, 16, 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_equal_those_expert_by_expert(counts, rank, dtype, transposed, device):
    from megaswift.bridge.kernels.low_rank_rows import add_low_rank, project_rows

    torch.manual_seed(0)
    width, ends = 200, ends_of(counts, device)
    x = torch.randn(sum(counts), width, device=device).to(dtype)
    shape = (len(counts), width, rank) if transposed else (len(counts), rank, width)
    factors = torch.randn(shape, device=device).to(dtype)
    factors = factors.transpose(1, 2) if transposed else factors
    parts = x.float().split(counts)

    low_rank = project_rows(x, factors, ends, 2.0)
    expected = torch.cat([2 * rows @ factor.float().t() for rows, factor in zip(parts, factors, strict=True)])
    assert_close(low_rank, expected, dtype)

    total = x.clone()
    add_low_rank(total, low_rank, factors, ends)
    added = [rows @ factor.float() for rows, factor in zip(low_rank.float().split(counts), factors, strict=True)]
    assert_close(total, x.float() + torch.cat(added), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_equal_those_expert_by_expert(counts, dtype, device):
    from megaswift.bridge.kernels.low_rank_rows import factor_gradients

    torch.manual_seed(0)
    x, low_rank = (torch.randn(sum(counts), width, device=device).to(dtype) for width in (200, 5))
    gradients = factor_gradients(x, low_rank, ends_of(counts, device))
    expected = [b.t() @ a for a, b in zip(x.float().split(counts), low_rank.float().split(counts), strict=True)]
    assert_close(gradients, torch.stack(expected), dtype)
