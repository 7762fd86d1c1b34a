"""The optimizer's plain way on a CPU, against torch's AdamW; its state goes to a checkpoint and comes back."""

import copy

import pytest
import torch
from megaswift.tasks.train.adamw import AdamW

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in ((30, 7), (5,), (0,))]


def optimizer_of(values: list[torch.Tensor]) -> AdamW:
    return AdamW([{"params": values}], {values[0]: values[0].bfloat16()}, **SETTINGS)


def step(optimizer: torch.optim.Optimizer, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) / scale
    optimizer.step()


def test_as_torch():
    ours, theirs = parameters(), [value.double().requires_grad_() for value in parameters()]
    optimizer, reference = optimizer_of(ours), torch.optim.AdamW(theirs, **SETTINGS)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.5), torch.tensor(0.0)
    for seed in range(3):
        step(optimizer, seed)
        step(reference, seed, 2.5)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(optimizer.copies[ours[0]], ours[0].bfloat16())


def test_nothing_changes_where_the_norm_is_not_finite():
    values = parameters()
    optimizer = optimizer_of(values)
    step(optimizer, 0)
    before = copy.deepcopy((values, list(optimizer.state.values()), list(optimizer.copies.values())))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(torch.nan), torch.tensor(1.0)
    step(optimizer, 1)
    after = (values, list(optimizer.state.values()), list(optimizer.copies.values()))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("by", ["parameter", "group"])
def test_goes_on_from_its_state(by):
    """megatron-core keeps the step of each parameter without Transformer Engine, and that of a group with it."""
    values = parameters()
    optimizer = optimizer_of(values)
    for seed in range(2):
        step(optimizer, seed)
    again = [value.clone() for value in values]
    other, saved = optimizer_of(again), copy.deepcopy(optimizer.state_dict())
    assert {float(state["step"]) for state in saved["state"].values()} == {2.0}
    if by == "group":
        saved["state"] = {
            number: {name: value for name, value in state.items() if name != "step"}
            for number, state in saved["state"].items()
        }
    other.load_state_dict(saved)
    for each in (optimizer, other):
        step(each, 5)
    assert all(torch.equal(*pair) for pair in zip(values, again, strict=True))
