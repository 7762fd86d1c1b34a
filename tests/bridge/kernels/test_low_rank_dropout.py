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


def leaves(device: str, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (40, 96), (rank, 96), (56, rank)  # x, A and B
    return [torch.randn(shape, device=device).requires_grad_() for shape in shapes]


def test_adapters_in_a_product_drop_their_input(monkeypatch, device):
    from megaswift.bridge.kernels import low_rank_dropout
    from megaswift.bridge.lora.product import adapted_linear

    x, a, b = leaves(device, rank=5)
    weight, keys = torch.randn(56, 96, device=device), low_rank_dropout.draw_keys(x)
    monkeypatch.setattr(low_rank_dropout, "draw_keys", lambda x: keys)
    output = adapted_linear(x, weight, a, b, 3.0, P)
    expected = x @ weight.t() + 3 / (1 - P) * (x * mask_of(96, keys)) @ a.t() @ b.t()
    torch.testing.assert_close(output, expected, atol=1e-3, rtol=1e-4)
    grad = torch.randn_like(output)
    for result, reference in zip(*(torch.autograd.grad(y, (x, a, b), grad) for y in (output, expected)), strict=True):
        torch.testing.assert_close(result, reference, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("rank", "is_fused"), [(64, True), (65, False)])
def test_wide_adapters_are_beside_the_product(rank, is_fused, monkeypatch, device):
    """Of more than 256 bytes a row, the kernels' tiles would not fit into a multiprocessor's memory."""
    from megaswift.bridge.kernels import low_rank_dropout
    from megaswift.bridge.lora.layers import FusedLinearAdapter, MatrixSharding
    from torch.distributed import ProcessGroup

    x, a, b = leaves(device, rank)
    weight = torch.randn(56, 96, device=device)
    parts = torch.ones(56, 1, dtype=torch.bool, device=device)
    place = MatrixSharding(None, ProcessGroup, sequence_parallel=False, communicates=True)  # pyright: ignore[reportArgumentType]
    adapter = FusedLinearAdapter(weight, parts, rank, 2.0, torch.float32, place, dropout=P, dora=False, bias=None)
    adapter.lora_A.data, adapter.lora_B.data = a.detach(), b.detach()
    calls = []
    draw = low_rank_dropout.draw_keys
    monkeypatch.setattr(low_rank_dropout, "draw_keys", lambda x: calls.append(x) or draw(x))
    dropped = adapter(input=x, weight=weight, bias=None)
    assert bool(calls) == is_fused
    assert not torch.allclose(dropped, adapter.eval()(input=x, weight=weight, bias=None))
    torch.testing.assert_close(
        adapter(input=x, weight=weight, bias=None), x @ weight.t() + 2 * x @ a.t() @ b.t(), atol=1e-3, rtol=1e-4
    )
