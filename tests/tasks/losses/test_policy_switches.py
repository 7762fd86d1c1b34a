"""Aggregation, KL estimators, dual clip and the entropy's bonus: verl's formulas, written down here, and TRL's loss."""

from itertools import product

import pytest
import torch
from megaswift.tasks.losses import policy as ours
from megaswift.tasks.losses.kl import KL_ESTIMATORS, kl_estimates
from megaswift.tasks.losses.policy import LOSS_AGG_MODES, Policy, Totals, normalised
from torch import Tensor

from tests.tasks.losses.test_policy import (
    LENGTHS,
    MAX_LENGTH,
    agree,
    gradient,
    padded,
    run,
    terms_of,
    theirs,
    totals_of,
)


def aggregated(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
    """verl's aggregation of losses [samples, width], where the width is --max_completion_length."""
    sums = (losses * mask).sum(1)
    return {
        "token-mean": sums.sum() / mask.sum(),
        "seq-mean-token-mean": (sums / mask.sum(1)).mean(),
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-sum-norm": (sums / MAX_LENGTH).mean(),
    }[mode]


def ratios_of(tensors: dict[str, Tensor]) -> Tensor:
    return (tensors["log_probs"] - tensors["old"]).exp()


def losses_of(loss_type: str, tensors: dict[str, Tensor]) -> Tensor:
    """Losses of tokens with a range of 0.15 below and 0.3 above."""
    ratios, advantages = ratios_of(tensors), tensors["advantages"][:, None]
    match loss_type:
        case "cispo":
            return -ratios.clamp(max=0.3).detach() * advantages * tensors["log_probs"]
        case "sapo":
            temperatures = torch.where(advantages > 0, 1.0, 1.05)
            return -torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures * advantages
    return -torch.minimum(ratios * advantages, ratios.clamp(0.85, 1.3) * advantages)


def same(loss: Tensor, expected: Tensor, tensors: dict[str, Tensor]) -> None:
    agree(loss, expected)
    slopes = gradient(expected, tensors)
    assert slopes.abs().max() > 1e-3
    agree(gradient(loss, tensors), slopes)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_aggregation(loss_type, mode):
    tensors = padded()
    settings = {"epsilon": 0.15, "epsilon_high": 0.3, "beta": 0.0, "max_completion_length": MAX_LENGTH}
    loss = run(Policy(loss_type, loss_agg_mode=mode, **settings), tensors)[0]
    same(loss, aggregated(losses_of(loss_type, tensors), tensors["mask"], mode), tensors)


def test_modes_differ():
    """Else the comparisons would say nothing."""
    tensors = padded()
    losses = [aggregated(losses_of("grpo", tensors), tensors["mask"], mode).item() for mode in LOSS_AGG_MODES]
    assert len({round(loss, 3) for loss in losses}) == len(LOSS_AGG_MODES)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_mode_of_a_loss_by_itself(loss_type):
    tensors = padded()
    mode = ours.IMPLIED_AGG_MODES[loss_type]
    policies = [Policy(loss_type, loss_agg_mode=m, max_completion_length=MAX_LENGTH) for m in (None, mode)]
    loss, other = (run(policy, tensors)[0] for policy in policies)
    assert torch.equal(loss, other)
    rest = [m for m in LOSS_AGG_MODES if m != mode]
    losses = [run(Policy(loss_type, loss_agg_mode=m, max_completion_length=MAX_LENGTH), tensors)[0] for m in rest]
    assert min((value - loss).abs() for value in losses) > 1e-3


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_shares_of_micro_batches_add_up(mode):
    """Five samples in one micro batch and one in another."""
    tensors = padded()
    policy = Policy(loss_agg_mode=mode, entropy_coef=0.3, max_completion_length=MAX_LENGTH)
    total = run(policy, tensors)[0]
    totals = Totals(len(LENGTHS), tensors["mask"].sum().item(), 2, len(LENGTHS))
    shares = []
    for first, last in ((0, 5), (5, 6)):
        mask = tensors["mask"].clone()
        mask[:first], mask[last:] = 0.0, 0.0
        terms, completions = terms_of(policy, tensors | {"mask": mask})
        shares.append(normalised(terms, policy, completions, totals)[0])
    agree(sum(shares), total)


def verls_kl(log_probs: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Penalties by verl's names kl, mse, low_var_kl and abs."""
    return {
        "k1": log_probs - ref,
        "k2": 0.5 * (log_probs - ref) ** 2,
        "k3": (ref - log_probs).exp() - (ref - log_probs) - 1,
        "abs": (log_probs - ref).abs(),
    }[estimator]


@pytest.mark.parametrize("estimator", [*KL_ESTIMATORS, None])
def test_kl_in_the_loss(estimator):
    tensors = padded()
    policy = Policy("dapo", epsilon=0.15, epsilon_high=0.3, beta=0.7, kl_estimator=estimator)
    loss, metrics = run(policy, tensors)
    kl = verls_kl(tensors["log_probs"], tensors["ref"], estimator or "k3")
    same(loss, aggregated(losses_of("dapo", tensors) + 0.7 * kl, tensors["mask"], "token-mean"), tensors)
    agree(metrics["kl"], aggregated(kl, tensors["mask"], "token-mean").detach())


def test_kl_estimators_are_finite_and_have_names():
    far = torch.tensor([-1e4, 1e4])
    for estimator in KL_ESTIMATORS:
        assert torch.isfinite(kl_estimates(far, -far, estimator)).all()
    with pytest.raises(ValueError, match="--kl_estimator k4: it has k1, k2, k3, abs"):
        kl_estimates(far, far, "k4")


@pytest.mark.parametrize("bound", [1.05, 1.6])
def test_dual_clip(bound):
    """verl's clip_ratio_c: the larger of two losses, but no more than -bound x a negative advantage."""
    tensors = padded()
    tensors["advantages"] = -tensors["advantages"]  # those that the policy has come closer to are negative
    ratios, advantages = ratios_of(tensors), tensors["advantages"][:, None]
    losses = losses_of("grpo", tensors)
    highest = -bound * advantages
    is_bound = (advantages < 0) & (losses > highest)
    assert is_bound[tensors["mask"] > 0].sum() > 1
    losses = torch.where(advantages < 0, torch.minimum(losses, highest), losses)
    policy = Policy(epsilon=0.15, epsilon_high=0.3, dual_clip=bound, beta=0.0)
    loss, metrics = run(policy, tensors)
    same(loss, aggregated(losses, tensors["mask"], "seq-mean-token-mean"), tensors)
    agree(metrics["clip_ratio/dual_mean"], aggregated(is_bound.float(), tensors["mask"], "token-mean"))
    assert ratios.max() > bound


def test_dual_clip_above_the_range_is_two_sided_clipping():
    tensors = padded()
    tensors["advantages"] = -tensors["advantages"]
    settings = {"epsilon": 0.15, "epsilon_high": 0.3, "beta": 0.0}
    loss, other = (run(Policy(**settings, **bound), tensors)[0] for bound in ({"dual_clip": 1.6}, {"delta": 1.6}))
    same(loss, other, tensors)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_entropy_bonus_is_trls(loss_type):
    tensors = padded()
    tensors["entropies"].requires_grad_()
    policy = Policy(loss_type, entropy_coef=0.3, max_completion_length=MAX_LENGTH)
    loss = run(policy, tensors)[0]
    settings = {"entropy_coef": 0.3, "_entropy_bonus_enabled": True, "use_adaptive_entropy": False}
    expected = theirs(policy, tensors, **settings)[0]
    same(loss, expected, tensors)
    slopes = [torch.autograd.grad(loss, tensors["entropies"], retain_graph=True)[0] for loss in (loss, expected)]
    assert slopes[1].abs().max() > 1e-3
    agree(slopes[0], slopes[1])


def test_entropy_bonus_of_nothing_trained():
    """A step whose completions were all left out has no loss."""
    tensors = padded()
    tensors["mask"] = torch.zeros_like(tensors["mask"])
    policy = Policy(entropy_coef=0.3)
    terms, completions = terms_of(policy, tensors)
    assert normalised(terms, policy, completions, totals_of(tensors["mask"]))[0] == 0


@pytest.mark.parametrize(("mode", "level"), list(product(LOSS_AGG_MODES, ("sequence", "sequence_token"))))
def test_aggregation_of_sequence_ratios(mode, level):
    tensors = padded()
    mask, advantages = tensors["mask"], tensors["advantages"][:, None]
    means = ((tensors["log_probs"] - tensors["old"]) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    ratios = means.exp().expand_as(mask)
    losses = -torch.minimum(ratios * advantages, ratios.clamp(0.85, 1.3) * advantages)
    settings = {"epsilon": 0.15, "epsilon_high": 0.3, "beta": 0.0, "max_completion_length": MAX_LENGTH}
    loss = run(Policy(loss_agg_mode=mode, importance_sampling_level=level, **settings), tensors)[0]
    same(loss, aggregated(losses, mask, mode), tensors)
