"""Losses of policies that TRL lacks, and measures of the engine, against straightforward formulas in torch."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megaswift.bridge.layers import future_sums as layer
from megaswift.tasks.losses.group_scores import score_groups
from megaswift.tasks.losses.policy import Completions, Policy
from megatron.core import parallel_state
from torch import Tensor

from tests.tasks.losses.test_policy import LENGTHS, agree, gradient, packed, padded, terms_of, totals_of
from tests.tasks.losses.test_policy import completions_of as of_packed

GROUPS = torch.tensor([4, 4, 4, 9, 9, 9])


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: SimpleNamespace(size=lambda: 1))


def future(values: Tensor, spans: list[int], decay: float) -> Tensor:
    """Discounted sums, by their definition."""
    sums = []
    for row in values.split(spans):
        sums += [
            sum((row[later] * decay ** (later - at) for later in range(at, len(row))), row.new_zeros(()))
            for at in range(len(row))
        ]
    return torch.stack(sums)


def test_sums_over_later_tokens_of_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "BLOCK", 4)
    spans = [5, 1, 13, 4, 8]
    values = torch.randn(sum(spans), generator=torch.Generator().manual_seed(0))
    for decay in (0.5, 0.98, 1.0):
        agree(layer.future_sums(values, torch.tensor(spans), decay), future(values, spans, decay), 1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_places_of_context_parallel_ranks(size: int) -> None:
    """Those of the collator's index."""
    from megaswift.templates.batching.collator import BatchLayout

    documents = [(torch.arange(n).numpy().astype("int32"), torch.ones(n).numpy()) for n in (5, 17, 9)]
    for rank in range(size):
        batch = BatchLayout(context_parallel_rank=rank, context_parallel_size=size).batch([documents], 1.0, 64)
        assert batch.cu_seqlens is not None
        assert batch.cp_index is not None
        spans = batch.cu_seqlens.diff().long() // size
        assert layer._places(spans, rank, size).equal(batch.cp_index)


def with_future_sums(completions: Completions) -> Completions:
    spans = torch.tensor([length + 2 for length in LENGTHS] + [3])
    return completions._replace(future_sums=lambda values, decay: layer.future_sums(values, spans, decay))


def fipo(policy: Policy, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """https://arxiv.org/abs/2603.19835: DAPO's loss, each token by the exponential of later tokens' log ratios."""
    mask, ratios = given["mask"], given["log_probs"] - given["old"]
    rho, advantages = ratios.exp(), given["advantages"][:, None]
    decay = 0.5 ** (1 / policy.fipo_decay_rate)
    participates = mask if policy.delta is None else mask * (rho <= policy.delta)
    sums = torch.zeros_like(mask)
    for at in range(mask.shape[1]):
        for later in range(at, mask.shape[1]):
            sums[:, at] += decay ** (later - at) * (participates * ratios.detach())[:, later]
    weight = sums.exp()
    if policy.fipo_clip_range:
        low = 1.0 if policy.fipo_clip_high_only else 1 - policy.fipo_clip_range
        weight = weight.clamp(low, 1 + policy.fipo_clip_range)
    unsafe = (advantages < 0) & (rho > policy.fipo_safety_threshold)
    weight = torch.where(unsafe, weight.clamp(0.8, 1.0), weight)
    bounded = rho if policy.delta is None else rho.clamp(max=policy.delta)
    clipped = rho.clamp(1 - policy.epsilon, 1 + policy.highest)
    losses = -weight.detach() * torch.minimum(bounded * advantages, clipped * advantages)
    count = mask.sum()
    means = {"future_kl_mean": sums, "influence_weight_mean": weight, "safety_keep_ratio": (~unsafe).float()}
    return (losses * mask).sum() / count, {name: (values * mask).sum() / count for name, values in means.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fipo_clip_high_only": False, "fipo_decay_rate": 2.0},
        {"fipo_clip_range": 0.0, "fipo_safety_threshold": 1.2, "fipo_decay_rate": 3.0},
        {"delta": 1.5, "fipo_clip_range": 3.0, "fipo_clip_high_only": False, "fipo_decay_rate": 1.0},
    ],
)
def test_fipo(settings: dict) -> None:
    given = padded()
    policy = Policy(loss_type="fipo", beta=0.0, epsilon=0.1, epsilon_high=0.3, **settings)
    loss, metrics = run(policy, given)
    wanted, means = fipo(policy, given)
    agree(loss, wanted)
    agree(gradient(loss, given), gradient(wanted, given))
    for name, value in means.items():
        agree(metrics[f"fipo/{name}"], value.detach())
    assert abs(float(means["influence_weight_mean"].detach()) - 1) > 0.01


def test_settings_of_fipo_matter() -> None:
    given, base = padded(), Policy(loss_type="fipo", beta=0.0, fipo_decay_rate=2.0, fipo_clip_high_only=False)
    changes = [{"fipo_decay_rate": 9.0}, {"fipo_clip_range": 0.5}, {"fipo_clip_high_only": True}]
    changes += [{"fipo_safety_threshold": 1.1}, {"delta": 1.3}]
    losses = {round(run(replace(base, **change), given)[0].item(), 6) for change in [{}, *changes]}
    assert len(losses) == len(changes) + 1


def run(policy: Policy, given: dict[str, Tensor], **more) -> tuple[Tensor, dict[str, Tensor]]:
    from unittest import mock

    from megaswift.tasks.losses.policy import normalised

    from tests.tasks.losses import test_policy

    with mock.patch.object(test_policy, "completions_of", lambda mask: with_future_sums(of_packed(mask))):
        terms, completions = terms_of(policy, given, **more)
    return normalised(terms, policy, completions, totals_of(given["mask"]))


def real(given: dict[str, Tensor], tau: float, members: Tensor) -> Tensor:
    """https://arxiv.org/abs/2602.05630: a classification of a prompt's completions by their scores."""
    scores = ((given["log_probs"] - given["old"]) * given["mask"]).sum(1) / given["mask"].sum(1).clamp(min=1)
    losses = []
    for group in GROUPS.unique():
        chosen = (group == GROUPS) & members
        positive, negative = scores[chosen & (given["advantages"] > 0)], scores[chosen & (given["advantages"] <= 0)]
        if len(positive) and len(negative):
            losses.append((1 + (negative / tau).exp().sum()).log() + (1 + (-positive / tau).exp().sum()).log())
        else:
            losses.append(scores.sum() * 0)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("tau", [0.5, 0.1])
@pytest.mark.parametrize("missing", [[], [0], [3, 5]])
def test_real(tau: float, missing: list[int]) -> None:
    """`missing`: samples that nothing has scored; without 3 and 5 a group has no positives."""
    given = padded()
    members = torch.ones(6, dtype=torch.bool)
    members[missing] = False
    scores = ((given["log_probs"] - given["old"]) * given["mask"]).sum(1) / given["mask"].sum(1)
    scored = score_groups(scores.detach().double(), given["advantages"], GROUPS, members, tau)
    sample = of_packed(given["mask"]).sample
    slopes = (scored.losses.float()[sample], scored.slopes.float()[sample])
    loss, _ = run(Policy(loss_type="real", beta=0.0), given, slopes=slopes)
    wanted = real(given, tau, members)
    agree(loss, wanted)
    assert wanted > 0
    agree(gradient(loss, given), gradient(wanted, given))


def test_real_without_a_mixed_group() -> None:
    scored = score_groups(torch.zeros(4).double(), torch.ones(4), torch.zeros(4).long(), torch.ones(4).bool(), 0.5)
    assert not scored.losses.any()
    assert not scored.slopes.any()


def test_measures_of_the_engine() -> None:
    """Means over tokens and over samples, in fp64."""
    given = padded()
    policy = Policy(beta=0.0, log_rollout_offpolicy_metrics=True)
    _, metrics = run(policy, given)
    mask = given["mask"].double()
    old, sampled = given["old"].double(), given["sampled"].double()
    count, counts = mask.sum(), mask.sum(1)
    ratio = (old - sampled) * mask
    mine, theirs = (old * mask).sum(1) / counts, (sampled * mask).sum(1) / counts
    wanted = {
        "kl": -ratio.sum() / count,
        "k3_kl": ((ratio.exp() - ratio - 1) * mask).sum() / count,
        "chi2_token": ((2 * ratio).exp() * mask).sum() / count - 1,
        "training_ppl": (-mine).exp().mean(),
        "training_log_ppl": -mine.mean(),
        "rollout_ppl": (-theirs).exp().mean(),
        "rollout_log_ppl": -theirs.mean(),
        "log_ppl_diff": (theirs - mine).mean(),
        "log_ppl_abs_diff": (theirs - mine).abs().mean(),
        "ppl_ratio": (theirs - mine).exp().mean(),
        "chi2_seq": (ratio.sum(1) / counts).exp().square().mean() - 1,
    }
    for name, value in wanted.items():
        agree(metrics[f"rollout_correction/{name}"].double(), value, 1e-5)
    assert packed(given["old"], given["mask"]).isnan().any()  # where nothing is trained nothing is read
