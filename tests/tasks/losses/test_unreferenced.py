"""Losses of pairs without a reference, against TRL's trainers and the papers' formulas."""

import pytest
import torch
from megaswift.tasks.losses.preference import Cpo, cpo_losses, orpo_terms
from torch import Tensor

from tests.tasks.losses import upstream


def pairs(count: int = 12, seed: int = 0, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Mean log-probabilities of chosen and rejected answers, some of them of likely ones."""
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = (-scale * torch.rand(2, count, generator=generator) ** 3).unbind()
    return chosen.requires_grad_(), rejected.requires_grad_()


def agree(mine: Tensor, theirs: Tensor, answers: tuple[Tensor, Tensor]) -> None:
    """The mean and the gradients."""
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    for found, wanted in zip(*(torch.autograd.grad(loss, answers) for loss in (mine, theirs)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("scale", [0.3, 3.0, 40.0])
def test_orpo_is_trls(beta: float, scale: float) -> None:
    chosen, rejected = pairs(scale=scale)
    nll = torch.tensor(1.7)
    terms = orpo_terms(chosen, rejected, beta)
    loss, metrics = upstream.unreferenced("orpo", chosen, rejected, nll, beta=beta)
    agree(nll + terms.losses.mean(), loss, (chosen, rejected))
    for name, values in (("log_odds_chosen", terms.log_odds), ("log_odds_ratio", terms.log_odds_ratio)):
        assert values.mean().item() == pytest.approx(metrics[name], rel=1e-6)


def test_orpo_is_the_ratio_of_odds() -> None:
    """https://arxiv.org/abs/2403.07691, equations 1 to 7, in fp64."""
    chosen, rejected = (values.detach().double() for values in pairs())
    odds = [values.exp() / (1 - values.exp()) for values in (chosen, rejected)]
    wanted = -0.3 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
    torch.testing.assert_close(orpo_terms(chosen, rejected, 0.3).losses, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("chosen", "rejected"), [(0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-1e4, -1e-9), (-1e4, -1e4)])
def test_orpo_stays_finite(chosen: float, rejected: float) -> None:
    """Where an answer is certain, or impossible."""
    answers = torch.tensor([chosen], requires_grad=True), torch.tensor([rejected], requires_grad=True)
    losses = orpo_terms(*answers, 0.1).losses
    assert all(values.isfinite().all() for values in (losses, *torch.autograd.grad(losses.sum(), answers)))


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize(
    "settings",
    [
        Cpo(),
        Cpo(0.5, label_smoothing=0.2),
        Cpo(2.0, "simpo"),
        Cpo(2.5, "simpo", 0.1, 0.4),
        Cpo(0.3, "hinge"),
        Cpo(0.3, "ipo"),
    ],
)
def test_cpo_and_simpo_are_trls(settings: Cpo, alpha: float) -> None:
    chosen, rejected = pairs(scale=30.0)
    nll = torch.tensor(1.7)
    loss, _ = upstream.unreferenced("cpo", chosen, rejected, nll, cpo_alpha=alpha, **vars(settings))
    agree(cpo_losses(chosen, rejected, settings).mean() + alpha * nll, loss, (chosen, rejected))


def test_which_losses_compare_means() -> None:
    assert [Cpo(loss_type=name).compares_means for name in ("sigmoid", "hinge", "ipo", "simpo")] == [
        *(False, False, True, True)
    ]


def test_cpo_names_its_losses() -> None:
    with pytest.raises(ValueError, match="--loss_type kto: CPO has sigmoid, hinge, ipo and simpo"):
        cpo_losses(*pairs(), Cpo(loss_type="kto"))
