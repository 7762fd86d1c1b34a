"""Tokens to their experts' rows and back, against indexing."""

import pytest
import torch

SHAPES = {"few": (37, 5, 2, 24), "one token": (1, 3, 3, 8), "many experts": (30, 300, 4, 20), "none": (0, 8, 2, 16)}


def choices(tokens: int, experts: int, topk: int, device: str) -> torch.Tensor:
    """Numbers of distinct experts, of which the first one has no token where that is possible."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0))
    scores[:, 0] = -1.0
    return scores.topk(topk, dim=1).indices.to(device, torch.int32)


@pytest.mark.parametrize(("tokens", "experts", "topk", "width"), SHAPES.values(), ids=SHAPES)
def test_rows_by_expert_and_back(device, monkeypatch, tokens, experts, topk, width):
    from megaswift.bridge.kernels import permute as kernels
    from megaswift.bridge.kernels.permute import permute, sort_map, unpermute

    monkeypatch.setattr(kernels, "MAX_PROGRAMS", 2)  # with many experts a program takes several steps
    chosen = choices(tokens, experts, topk, device)
    places, counts = sort_map(chosen, experts)
    order = chosen.flatten().argsort(stable=True)  # of (token, k) by expert, then by token
    assert torch.equal(places.flatten()[order].cpu(), torch.arange(tokens * topk, dtype=torch.int32))
    assert torch.equal(counts.long(), chosen.flatten().long().bincount(minlength=experts))

    x = torch.randn(tokens, width, device=device, requires_grad=True)
    weights = torch.rand(tokens, topk, device=device, requires_grad=True)
    rows, row_weights = permute(x, places, weights)
    assert torch.equal(rows, x[order // topk])
    assert torch.equal(row_weights, weights.flatten()[order])
    slopes, weight_slopes = torch.randn_like(rows), torch.randn_like(row_weights)
    ((rows * slopes).sum() + (row_weights * weight_slopes).sum()).backward()
    torch.testing.assert_close(x.grad, slopes[places.long()].sum(1))
    torch.testing.assert_close(weights.grad, weight_slopes[places.long()])

    rows = rows.detach().requires_grad_()
    summed = unpermute(rows * 2, places)
    torch.testing.assert_close(summed, x * 2 * topk)
    slopes = torch.randn_like(summed)
    (summed * slopes).sum().backward()
    assert torch.equal(rows.grad, slopes[order // topk] * 2)


def test_chunks_are_sorted_as_megatron_core_sorts_them(device):
    from megaswift.bridge.kernels.permute import chunk_sort_map, permute, unpermute
    from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

    counts = torch.tensor([[3, 0, 2], [1, 4, 0], [0, 0, 5], [2, 1, 1]])  # of four sources for three experts
    total = int(counts.sum())
    x, weights = torch.randn(total, 10, device=device), torch.rand(total, device=device)
    by_expert = torch.arange(counts.numel()).view(counts.shape).t().flatten()
    wanted, wanted_weights = sort_chunks_by_idxs(x, counts.flatten(), by_expert, probs=weights)
    places = chunk_sort_map(counts.to(device), total)
    rows, row_weights = permute(x, places, weights.unsqueeze(1))
    assert torch.equal(rows, wanted)
    assert torch.equal(row_weights, wanted_weights)
    assert torch.equal(unpermute(rows, places), x)
