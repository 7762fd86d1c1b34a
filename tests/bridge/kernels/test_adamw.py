"""AdamW over many tensors in one launch, against torch's in fp64."""

import pytest
import torch

SIZES = {"aligned": [(3, 2048), (16,), (4096,), (5008,)], "odd": [(7, 1001), (3,), (4096,), (1,)]}
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.fixture
def made(device, request):
    """An AdamW whose second group has no decay, and torch's on the same values in fp64."""
    from megaswift.tasks.train.adamw import AdamW

    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for size in SIZES[request.param]]
    ours = [value.clone().to(device) for value in values]
    copies = {each: each.half() for each in ours[1:]}
    theirs = [value.double().requires_grad_() for value in values]

    def groups(tensors):
        return [{"params": tensors[:2], "weight_decay": 0.1}, {"params": tensors[2:], "weight_decay": 0.0}]

    return AdamW(groups(ours), copies, **SETTINGS), torch.optim.AdamW(groups(theirs), **SETTINGS), ours, theirs


@pytest.mark.parametrize("made", SIZES, indirect=True)
def test_adamw(made, device):
    optimizer, reference, ours, theirs = made
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            gradient = 3 * torch.randn(one.shape, generator=generator)
            one.grad, other.grad = gradient.to(device), gradient.double() / 2.5
        optimizer.grad_scale = torch.tensor(2.5, device=device)
        optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu().double(), other.detach(), rtol=1e-6, atol=1e-6)
    for master, copy in optimizer.copies.items():
        torch.testing.assert_close(copy, master.half())


@pytest.mark.parametrize("made", ["odd"], indirect=True)
def test_nothing_changes_where_the_norm_is_not_finite(made, device):
    optimizer, _, ours, _ = made
    kept = [*ours, *optimizer.copies.values(), *(each for state in optimizer.state.values() for each in state.values())]
    before = [each.clone() for each in kept]
    for one in ours:
        one.grad = torch.full_like(one, torch.nan)
    optimizer.grad_scale, optimizer.found_inf = (torch.tensor(x, device=device) for x in (torch.nan, 1.0))
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, kept, strict=True))


@pytest.mark.parametrize("made", SIZES, indirect=True)
def test_sum_of_squares(made, device):
    optimizer, _, ours, _ = made
    expected = sum(float(one.double().square().sum()) for one in ours)
    assert float(optimizer.sum_of_squares(ours)) == pytest.approx(expected, rel=1e-6)
    ours[2][5] = torch.inf
    assert not optimizer.sum_of_squares(ours).isfinite()
    ours[2][5] = torch.nan
    assert not optimizer.sum_of_squares(ours).isfinite()
