"""Losses of preference training, against TRL's trainers and the papers' formulas."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megaswift.tasks.losses import preference
from megaswift.tasks.losses.preference import Dpo, Pairs, dpo_losses, kto_losses, reward_losses

from tests.tasks.losses import upstream

SMOOTHING = {"exo_pair": 1e-3, "robust": 0.1, "aot": 0.1, "aot_unpaired": 0.1}
SEQUENCES = [name for name in preference.LOSS_TYPES if name != "sft"]
TOGETHER = {"aot", "aot_unpaired"}  # sort the pairs
DIVERGENT = ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"]
anything = settings(max_examples=25, deadline=None, database=None, derandomize=True)


def pairs_of(count: int = 12, seed: int = 0, spread: float = 8.0) -> Pairs:
    """Policy and reference differ by some `spread` nats."""
    generator = torch.Generator().manual_seed(seed)
    ref_chosen, ref_rejected = -60 * torch.rand(2, count, generator=generator)
    chosen, rejected = torch.stack([ref_chosen, ref_rejected]) + spread * torch.randn(2, count, generator=generator)
    tokens = torch.randint(1, 40, (2, count), generator=generator)
    return Pairs(chosen.requires_grad_(), rejected.requires_grad_(), ref_chosen, ref_rejected, *tokens)


def each(pairs: Pairs) -> list[Pairs]:
    return [Pairs(*(values[i : i + 1] for values in pairs)) for i in range(len(pairs.chosen))]


def agree(mine, theirs, bound: float = 1e-6):
    torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)


def with_gradients(losses: torch.Tensor, pairs: Pairs) -> list[torch.Tensor]:
    """The mean, and the gradients by the policy's log-probabilities."""
    return [losses.mean(), *torch.autograd.grad(losses.mean(), (pairs.chosen, pairs.rejected))]


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo_is_trls(name, beta):
    """Means and gradients over all pairs, and each pair by itself."""
    pairs = pairs_of()
    options = Dpo(beta=beta, loss_type=(name,), label_smoothing=SMOOTHING.get(name, 0.0))
    losses = dpo_losses(pairs, options)
    agree(with_gradients(losses, pairs), with_gradients(upstream.dpo(pairs, options)[0], pairs))
    if name not in TOGETHER:
        agree(losses, torch.stack([upstream.dpo(pair, options)[0] for pair in each(pairs)]))


@pytest.mark.parametrize("name", DIVERGENT)
@pytest.mark.parametrize(
    ("divergence", "alpha"),
    [("forward_kl", 0.5), ("js_divergence", 0.5), ("alpha_divergence", 0.5), ("alpha_divergence", 1.0)],
)
def test_divergences_are_trls(name, divergence, alpha):
    pairs = pairs_of(spread=1.0)
    options = Dpo(
        loss_type=(name,),
        label_smoothing=SMOOTHING.get(name, 0.0),
        f_divergence_type=divergence,
        f_alpha_divergence_coef=alpha,
    )
    losses = dpo_losses(pairs, options)
    agree(with_gradients(losses, pairs), with_gradients(upstream.dpo(pairs, options)[0], pairs))


def test_policy_and_reference_sort_pairs_differently():
    """Else the losses of optimal transport would be those of the pairs as they are."""
    pairs = pairs_of()
    policy, reference = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    assert policy.argsort().tolist() != reference.argsort().tolist()


def test_several_losses_are_trls():
    """As MPO has them (https://arxiv.org/abs/2411.10442), but for its loss of tokens."""
    pairs = pairs_of()
    options = Dpo(loss_type=("sigmoid", "bco_pair", "ipo"), loss_weights=(0.8, 0.2, 1.5))
    agree(dpo_losses(pairs, options).mean(), upstream.dpo(pairs, options)[0])


def test_the_loss_of_tokens_is_left_out():
    pairs = pairs_of()
    options = Dpo(loss_type=("sft", "sigmoid"), loss_weights=(3.0, 0.5))
    assert options.terms == (("sft", 3.0), ("sigmoid", 0.5))
    agree(dpo_losses(pairs, options), 0.5 * dpo_losses(pairs, Dpo()))
    assert not dpo_losses(pairs, Dpo(loss_type=("sft",))).any()


@pytest.mark.parametrize("name", SEQUENCES)
def test_no_pairs_have_no_losses(name):
    """As in a micro batch that only fills up a step: gradients are there."""
    pairs = pairs_of(count=0)
    losses = dpo_losses(pairs, Dpo(loss_type=(name,), label_smoothing=SMOOTHING.get(name, 0.0)))
    assert losses.shape == (0,)
    torch.autograd.grad(losses.sum(), (pairs.chosen, pairs.rejected))


def test_smoothed_sigmoid_is_cdpo():
    """https://ericmitchell.ai/cdpo.pdf: binary cross entropy of the preference against 1 - smoothing."""
    pairs = pairs_of()
    logits = 0.3 * ((pairs.chosen - pairs.ref_chosen) - (pairs.rejected - pairs.ref_rejected))
    target = torch.full_like(logits, 0.8)
    expected = -(target * logits.sigmoid().log() + (1 - target) * (1 - logits.sigmoid()).log())
    agree(dpo_losses(pairs, Dpo(beta=0.3, label_smoothing=0.2)), expected, 1e-5)


@pytest.mark.parametrize("name", SEQUENCES)
def test_without_a_reference(name):
    """TRL 1.16 has no such flag; with it, all answers are equally likely to the reference."""
    pairs = pairs_of(spread=3.0)
    options = Dpo(loss_type=(name,), label_smoothing=SMOOTHING.get(name, 0.0), reference_free=True)
    zero = torch.zeros_like(pairs.ref_chosen)
    agree(
        dpo_losses(pairs, options).mean(), upstream.dpo(pairs._replace(ref_chosen=zero, ref_rejected=zero), options)[0]
    )


def test_rewards_are_trls():
    pairs = pairs_of()
    chosen, rejected = preference.dpo_rewards(pairs, Dpo(beta=0.3, f_divergence_type="forward_kl"))
    logged = upstream.dpo(pairs, Dpo(beta=0.3))[1]
    assert chosen.mean().item() == pytest.approx(logged["rewards/chosen"], rel=1e-6)
    assert rejected.mean().item() == pytest.approx(logged["rewards/rejected"], rel=1e-6)
    assert (chosen > rejected).float().mean().item() == pytest.approx(logged["rewards/accuracies"])
    assert not chosen.requires_grad


@pytest.mark.parametrize(
    ("name", "divergence"),
    [(name, "reverse_kl") for name in SEQUENCES]
    + list(product(DIVERGENT, ["forward_kl", "js_divergence", "alpha_divergence"])),
)
@pytest.mark.parametrize("ratios", [(1e4, -1e4), (-1e4, 1e4), (1e4, 1e4), (-1e4, -1e4)])
def test_losses_and_gradients_stay_finite(name, divergence, ratios):
    """However far the policy is from its reference."""
    zero, one = torch.zeros(2), torch.ones(2)
    pairs = Pairs(*(torch.full((2,), ratio, requires_grad=True) for ratio in ratios), zero, zero, one, one)
    for tau in (0.05, 2.0):
        options = Dpo(
            loss_type=(name,),
            label_smoothing=SMOOTHING.get(name, 0.0),
            f_divergence_type=divergence,
            discopop_tau=tau,
        )
        for found in with_gradients(dpo_losses(pairs, options), pairs):
            assert found.isfinite().all()


def test_every_loss_of_trl_is_there():
    for name in preference.LOSS_TYPES:
        assert upstream.dpo(pairs_of(), Dpo(loss_type=(name,), label_smoothing=0.1))[0].isfinite()
    with pytest.raises(ValueError, match="Unknown loss type") as error:
        upstream.dpo(pairs_of(), Dpo(loss_type=("none of them",)))
    assert all(f"'{name}'" in str(error.value) for name in preference.LOSS_TYPES)
    assert str(error.value).count("'") == 2 * len(preference.LOSS_TYPES)


numbers = st.integers(1, 12).flatmap(
    lambda count: st.lists(
        st.tuples(*[st.floats(-50, 50, width=32)] * 4, st.integers(1, 30), st.integers(1, 30)),
        min_size=count,
        max_size=count,
    )
)


def read(rows: list[tuple]) -> Pairs:
    return Pairs(*(torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize("name", SEQUENCES)
@anything
@given(rows=numbers, shift=st.floats(-20, 20))
def test_properties_of_dpo(name, rows, shift):
    """A prompt's own probability is in policy and reference alike, and changes nothing; neither does the order."""
    pairs = read(rows)
    options = Dpo(loss_type=(name,), label_smoothing=SMOOTHING.get(name, 0.0))
    losses = dpo_losses(pairs, options)
    assert losses.shape == pairs.chosen.shape
    moved = pairs._replace(
        **{key: getattr(pairs, key) + shift for key in ("chosen", "ref_chosen", "rejected", "ref_rejected")}
    )
    agree(dpo_losses(moved, options).sum(), losses.sum(), 1e-3)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(len(rows)))
    mixed = dpo_losses(Pairs(*(values[order] for values in pairs)), options)
    agree(mixed.sum(), losses.sum(), 1e-5)
    if name not in TOGETHER:
        agree(mixed, losses[order])


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "sigmoid_norm", "bco_pair", "apo_zero", "aot_unpaired", "aot"])
@anything
@given(rows=numbers)
def test_what_is_chosen_becomes_likelier(name, rows):
    """The gradient never asks for a less likely chosen answer, or a likelier rejected one."""
    pairs = read(rows)
    pairs = pairs._replace(chosen=pairs.chosen.requires_grad_(), rejected=pairs.rejected.requires_grad_())
    _, chosen, rejected = with_gradients(dpo_losses(pairs, Dpo(loss_type=(name,))), pairs)
    assert (chosen <= 0).all()
    assert (rejected >= 0).all()


def kto_numbers(count: int, seed: int = 0):
    """log_probs, ref, desirable, and the mismatched answers' log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    log_probs, ref, policy, policy_ref = -10 * torch.rand(4, count, generator=generator)
    desirable = torch.rand(count, generator=generator) < 0.5
    return log_probs.requires_grad_(), ref, desirable, (policy, policy_ref)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("seed", range(6))
def test_kto_is_trls(loss_type, seed):
    """Some seeds' KL is below 0, and then is 0."""
    settings = {"beta": 0.3, "loss_type": loss_type, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    log_probs, ref, desirable, mismatched = kto_numbers(9, seed)
    kl = preference.kto_kl(*mismatched).mean().clamp(min=0)
    mine = kto_losses(log_probs, ref, desirable, kl, **settings)
    theirs, logged = upstream.kto(log_probs, ref, desirable, mismatched, **settings)
    agree(mine.mean(), theirs)
    agree(*(torch.autograd.grad(loss, log_probs)[0] for loss in (mine.mean(), theirs)))
    if loss_type == "kto":
        assert kl.item() == pytest.approx(logged["kl"])


def test_seeds_have_both_signs_of_kl():
    signs = {bool(preference.kto_kl(*kto_numbers(9, seed)[3]).mean() > 0) for seed in range(6)}
    assert signs == {True, False}


@pytest.mark.parametrize("ratio", [1e4, -1e4])
@pytest.mark.parametrize("kl", [0.0, 1e4])
def test_kto_stays_finite(ratio, kl):
    log_probs = torch.full((2,), ratio, requires_grad=True)
    losses = kto_losses(log_probs, torch.zeros(2), torch.tensor([True, False]), kl)
    assert losses.isfinite().all()
    assert torch.autograd.grad(losses.sum(), log_probs)[0].isfinite().all()


def test_kto_names_its_losses():
    with pytest.raises(ValueError, match="--loss_type sigmoid: KTO has kto and apo_zero_unpaired"):
        kto_losses(*kto_numbers(2)[:3], 0.0, loss_type="sigmoid")


@anything
@given(seed=st.integers(0, 10**6), count=st.integers(0, 9), kl=st.floats(0, 30))
def test_properties_of_kto(seed, count, kl):
    """Losses lie between 0 and the weight; each is its own sample's alone; desirable answers become likelier."""
    log_probs, ref, desirable, _ = kto_numbers(count, seed)
    losses = kto_losses(log_probs, ref, desirable, kl, 0.1, "kto", 2.0, 3.0)
    assert losses.shape == (count,)
    assert ((losses >= 0) & (losses <= torch.where(desirable, 2.0, 3.0))).all()
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert (torch.where(desirable, -gradient, gradient) >= 0).all()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    agree(kto_losses(log_probs[order], ref[order], desirable[order], kl, 0.1, "kto", 2.0, 3.0), losses[order])


@pytest.mark.parametrize("coefficient", [None, 0.01])
@pytest.mark.parametrize("margins", [None, torch.tensor([0.0, 1.0, 0.5, 3.0, 0.2])])
def test_reward_losses_are_trls(coefficient, margins):
    chosen, rejected = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).mul(4).unbind()
    losses = reward_losses(chosen, rejected, margins, coefficient)
    agree(losses.mean(), upstream.reward(chosen, rejected, margins, coefficient))
    alone = [
        upstream.reward(
            chosen[i : i + 1], rejected[i : i + 1], None if margins is None else margins[i : i + 1], coefficient
        )
        for i in range(5)
    ]
    agree(losses, torch.stack(alone))


@anything
@given(rewards=st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4)), max_size=8), shift=st.floats(-100, 100))
def test_properties_of_reward_losses(rewards, shift):
    """Only differences count, without a coefficient; gradients are finite."""
    chosen, rejected = torch.tensor(rewards, dtype=torch.float64).reshape(-1, 2).unbind(dim=1)
    agree(reward_losses(chosen + shift, rejected + shift, None, None), reward_losses(chosen, rejected, None, None))
    chosen, rejected = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    for gradient in torch.autograd.grad(reward_losses(chosen, rejected, None, 0.1).sum(), (chosen, rejected)):
        assert gradient.isfinite().all()


def test_a_margin_asks_for_more():
    chosen, rejected = torch.tensor([1.0]), torch.tensor([0.0])
    assert reward_losses(chosen, rejected, torch.tensor([2.0]), None) > reward_losses(chosen, rejected, None, None)


def test_options_are_values():
    """Frozen, with weights of 1 where none are given."""
    assert replace(Dpo(), loss_type=("ipo", "hinge")).terms == (("ipo", 1.0), ("hinge", 1.0))
