"""Losses of policies, against TRL's GRPOTrainer on the same numbers and the papers' formulas."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from threading import Barrier
from unittest import mock

import pytest
import torch
from megaswift.tasks.losses import policy as ours
from megaswift.tasks.losses.policy import (
    BaselineLogProbs,
    Completions,
    Policy,
    Terms,
    Totals,
    clipped_shares,
    normalised,
    policy_losses,
)
from torch import Tensor

from tests.tasks.losses import upstream

LENGTHS, WIDTH, MAX_LENGTH = (5, 1, 9, 3, 7, 2), 9, 11
DRIFT = (0.4, 0.7, -0.4, -0.3, 0.1, 0.3)  # of each sample's log-probabilities
TRLS = tuple(name for name in ours.LOSS_TYPES if name not in ("real", "fipo"))  # the losses that TRL has
NAMES = {"old": "old_per_token_logps", "ref": "ref_per_token_logps"}


def padded(seed: int = 0) -> dict[str, Tensor]:
    """Samples as TRL has them: [samples] and [samples, width]; a tool's tokens are in one of them. The policy has gone
    far enough from the others for every bound to matter, on both sides."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(spread: float) -> Tensor:
        return spread * torch.randn(len(LENGTHS), WIDTH, generator=generator)

    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).float()
    mask[2, 3:5] = 0.0
    old = -2 + drawn(1.0)
    return {
        "log_probs": (old + torch.tensor(DRIFT)[:, None] + drawn(0.4)).requires_grad_(),
        "old": old,
        "ref": old + drawn(0.6),
        "sampled": old + drawn(0.5),
        "entropies": drawn(1.0).abs(),
        "advantages": torch.tensor([1.3, -0.7, -1.1, 0.4, 0.0, 0.9]),
        "mask": mask,
    }


def packed(values: Tensor, mask: Tensor) -> Tensor:
    """[samples, width] -> [tokens]: the trained tokens in a row, prompts before each sample, padding at the end. What
    is there is no number."""
    rows = [torch.cat([torch.full((2,), torch.nan), row[:length]]) for row, length in zip(values, LENGTHS, strict=True)]
    return torch.cat([*rows, torch.full((3,), torch.nan)])


def completions_of(mask: Tensor) -> Completions:
    sample = torch.tensor([number for number, length in enumerate(LENGTHS) for _ in range(length + 2)] + [0] * 3)
    mine = packed(mask, mask).nan_to_num()
    counts = torch.zeros(len(LENGTHS)).index_add(0, sample, mine)
    return Completions(sample, mine, counts, lambda x: torch.zeros(len(LENGTHS)).index_add(0, sample, x))


def totals_of(mask: Tensor) -> Totals:
    return Totals(len(mask), mask.sum().item(), 1, int(mask.any(1).sum()))


def terms_of(
    policy: Policy, given: dict[str, Tensor], *, old_log_probs: bool = True, **more
) -> tuple[Terms, Completions]:
    """What the model gives is 0 where it is not asked for; of the rest nothing is known there."""
    mask = given["mask"]
    log_probs, entropies = (packed(given[name], mask).nan_to_num() for name in ("log_probs", "entropies"))
    completions = completions_of(mask)
    old, ref, sampled = (packed(given[name], mask) for name in ("old", "ref", "sampled"))
    baselines = BaselineLogProbs(old if old_log_probs else None, ref, sampled)
    rest = {"baselines": baselines, "entropies": entropies} | more
    return policy_losses(policy, log_probs, given["advantages"][completions.sample], completions, **rest), completions


def run(policy: Policy, given: dict[str, Tensor], **more) -> tuple[Tensor, dict[str, Tensor]]:
    """Our loss and metrics."""
    terms, completions = terms_of(policy, given, **more)
    return normalised(terms, policy, completions, totals_of(given["mask"]))


def theirs(policy: Policy, given: dict[str, Tensor], more: dict | None = None, **settings):
    inputs = {"advantages": given["advantages"], "completion_mask": given["mask"]}
    inputs |= {name: given[mine] for mine, name in NAMES.items()} | (more or {})
    return upstream.grpo(
        given["log_probs"],
        given["entropies"],
        inputs,
        loss_type=policy.loss_type,
        epsilon_low=policy.epsilon,
        epsilon_high=policy.highest,
        importance_sampling_level=policy.importance_sampling_level,
        beta=policy.beta,
        max_completion_length=policy.max_completion_length,
        args={
            "delta": policy.delta,
            "sapo_temperature_pos": policy.tau_pos,
            "sapo_temperature_neg": policy.tau_neg,
        },
        **settings,
    )


def agree(mine, others, bound: float = 1e-6):
    torch.testing.assert_close(mine, others, rtol=bound, atol=bound)


def gradient(loss: Tensor, given: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(loss, given["log_probs"], retain_graph=True)[0]


def same(mine: tuple, others: tuple, given: dict[str, Tensor]):
    """Loss, gradient, and TRL's metrics that are means."""
    agree(mine[0], others[0])
    found, expected = gradient(mine[0], given), gradient(others[0], given)
    assert expected.abs().max() > 1e-3
    agree(found, expected)
    metrics = {name: value for name, value in others[1].items() if name.split("_")[-1] not in ("min", "max")}
    ours = {name: value.item() for name, value in mine[1].items() if not name.startswith(("loss", "sampling"))}
    assert ours.keys() == metrics.keys()
    for name, value in metrics.items():
        assert ours[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TRLS)
def test_losses_are_trls(loss_type, level):
    given = padded()
    high = 1.2 if loss_type == "cispo" else 0.3
    for delta, beta in product((None, 1.25, 1.6), (0.0, 0.04)):
        policy = Policy(
            loss_type,
            epsilon=0.15,
            epsilon_high=high,
            delta=delta,
            importance_sampling_level=level,
            beta=beta,
            tau_neg=1.4,
            max_completion_length=MAX_LENGTH,
        )
        same(run(policy, given), theirs(policy, given), given)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_bound_is_reached(level):
    """Else the comparison would say nothing of them."""
    given = padded()
    policy = Policy(epsilon=0.15, epsilon_high=0.3, importance_sampling_level=level)
    metrics = run(policy, given)[1]
    assert metrics["clip_ratio/low_mean"] > 0.1
    assert metrics["clip_ratio/high_mean"] > 0.1
    assert run(replace(policy, loss_type="cispo", epsilon_high=1.2), given)[1]["cispo_clip_ratio"] > 0.1
    losses = [run(replace(policy, delta=delta), given)[0].item() for delta in (None, 1.25, 1.6)]
    assert len({round(loss, 4) for loss in losses}) == 3


def planted(fault: str):
    """A fault in what `run` calls."""
    clipped, exponential, kl_of, weights = ours._clipped, ours._exponential, ours.kl_of, ours._weights
    match fault:
        case "no delta":
            return mock.patch.dict(ours._LOSSES, grpo=lambda policy, *rest: clipped(replace(policy, delta=None), *rest))
        case "ratios upside down":
            return mock.patch.object(ours, "_exponential", lambda values: exponential(-values))
        case "reference and policy swapped":
            return mock.patch.object(ours, "kl_of", lambda policys, refs, *rest: kl_of(refs, policys, *rest))
        case "sums for means":
            ones = torch.ones(len(LENGTHS))
            return mock.patch.object(ours, "_weights", lambda p, r, c: weights(p, r, c._replace(counts=ones)))
        case _:
            return mock.patch.object(ours, "_trained", lambda values, completions: values)


@pytest.mark.parametrize(
    "fault", ["no delta", "ratios upside down", "reference and policy swapped", "sums for means", "prompts count"]
)
def test_planted_faults_show(fault):
    given = padded()
    policy = Policy(epsilon=0.15, delta=1.6, importance_sampling_level="sequence")
    same(run(policy, given), theirs(policy, given), given)
    with planted(fault):
        found = run(policy, given)
    with pytest.raises(AssertionError):
        same(found, theirs(policy, given), given)


def test_upper_bound_is_the_lower_one_unless_given():
    given = padded()
    assert torch.equal(run(Policy(epsilon=0.1), given)[0], run(Policy(epsilon=0.1, epsilon_high=0.1), given)[0])
    assert not torch.equal(run(Policy(epsilon=0.1), given)[0], run(Policy(epsilon=0.1, epsilon_high=0.3), given)[0])


@pytest.mark.parametrize("loss_type", TRLS)
def test_on_policy(loss_type):
    """The policy that has sampled is this one: TRL's gradient is there, where the weights are all 1."""
    given = padded()
    policy = Policy(loss_type, epsilon_high=0.9, max_completion_length=MAX_LENGTH)
    others = theirs(policy, given | {"old": given["log_probs"].detach()})
    same(run(policy, given, old_log_probs=False), others, given)


def test_samples_that_are_cut_out():
    """All of a sample's tokens are masked (an empty completion, or one too long): it counts as a sample still."""
    given = padded()
    given["mask"][4] = 0.0
    for loss_type, level in product(TRLS, ("token", "sequence")):
        policy = Policy(loss_type, importance_sampling_level=level, max_completion_length=MAX_LENGTH)
        mine, others = run(policy, given), theirs(policy, given)
        agree(mine[0], others[0])
        agree(gradient(mine[0], given), gradient(others[0], given))
    given["mask"][:] = 0.0
    loss, metrics = run(Policy(), given)
    assert loss == 0
    assert not gradient(loss, given).any()
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("quantile", [0.2, 0.5])
def test_only_uncertain_tokens(quantile):
    given = padded()
    least = given["entropies"][given["mask"].bool()].quantile(1 - quantile)
    for policy in (Policy(beta=0.04), Policy("dapo", 0.9, beta=0.0, importance_sampling_level="sequence")):
        same(run(policy, given, entropy_threshold=least), theirs(policy, given, top_entropy_quantile=quantile), given)


@pytest.mark.parametrize("mode", ours.CORRECTIONS)
def test_what_an_engine_has_sampled(mode):
    """TRL multiplies by weights that it has found when it generated: here those of the formulas."""
    given = padded()
    mask, threshold = given["mask"], 0.7
    differences = (given["old"] - given["sampled"]) * mask
    ratios = (differences.sum(1, keepdim=True) if mode.startswith("sequence") else differences).exp()
    weights = ratios.clamp(max=threshold) if mode.endswith("truncate") else torch.where(ratios > threshold, 0.0, ratios)
    assert 0 < (ratios > threshold).float().mean() < 1
    policy = Policy(beta=0.04, rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=threshold)
    mine = run(policy, given)
    same(mine, theirs(policy, given, {"importance_sampling_ratio": weights}), given)
    mean = weights.mean() if mode.startswith("sequence") else weights[mask.bool()].mean()
    agree(mine[1]["sampling/importance_sampling_ratio/mean"], mean)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("drift", [0.0, 1.8])
def test_the_least_and_the_most_that_is_clipped(drift, level):
    """Of a completion; `drift`: so far that every completion has tokens below, if its advantage is negative."""
    given = padded()
    if drift:
        given |= {"old": given["old"] + drift, "advantages": -given["advantages"].abs() - 0.1}
    policy = Policy(epsilon=0.15, epsilon_high=0.3, importance_sampling_level=level, max_completion_length=MAX_LENGTH)
    shares, metrics = clipped_shares(*terms_of(policy, given)), theirs(policy, given)[1]
    assert shares["clip_ratio/low"].min().item() == pytest.approx(metrics["clip_ratio/low_min"], abs=1e-6)
    assert shares["clip_ratio/high"].max().item() == pytest.approx(metrics["clip_ratio/high_max"], abs=1e-6)
    assert (metrics["clip_ratio/low_min"] > 0) == (drift > 0)
    assert (metrics["clip_ratio/high_max"] > 0) == (drift == 0)
    given["mask"][4] = 0.0  # a completion of no token has no share
    assert len(clipped_shares(*terms_of(policy, given))["clip_ratio/low"]) == len(LENGTHS) - 1
    assert not clipped_shares(*terms_of(replace(policy, loss_type="cispo"), given))


@pytest.mark.parametrize("loss_type", TRLS)
def test_samples_that_are_too_far_off(loss_type):
    """https://arxiv.org/abs/2512.02556, equation 9, as TRL has it: of those that are worse than others."""
    given = padded()
    delta, high = 0.2, 1.2 if loss_type == "cispo" else 0.3
    policy = Policy(
        loss_type, epsilon_high=high, off_policy_sequence_mask_delta=delta, max_completion_length=MAX_LENGTH
    )
    more = {"sampling_per_token_logps": given["sampled"]}
    mine = run(policy, given)
    same(mine, theirs(policy, given, more, off_policy_mask_threshold=delta), given)
    far = ((given["sampled"] - given["log_probs"].detach()) * given["mask"]).sum(1) / given["mask"].sum(1) > delta
    masked = far & (given["advantages"] < 0)
    assert 0 < masked.sum() < far.sum()
    agree(mine[1]["sampling/off_policy_masked"], masked.float().mean())


def test_gspo_token():
    """https://arxiv.org/abs/2507.18071: s_t = sg(s) x pi_t / sg(pi_t), s the geometric mean of the ratios."""
    given = padded()
    policy = Policy(epsilon=0.15, importance_sampling_level="sequence_token", beta=0.0)
    expected = torch.zeros(())
    for log_probs, old, kept, advantage in zip(
        given["log_probs"], given["old"], given["mask"].bool(), given["advantages"], strict=True
    ):
        probability = log_probs[kept].exp()
        mean = (probability / old[kept].exp()).detach().log().mean().exp()
        weights = mean * probability / probability.detach()
        objective = torch.minimum(weights * advantage, weights.clamp(0.85, 1.15) * advantage)
        expected = expected - objective.mean() / len(LENGTHS)
    loss, metrics = run(policy, given)
    agree(loss, expected)
    agree(gradient(loss, given), gradient(expected, given))
    of_sequences = run(replace(policy, importance_sampling_level="sequence"), given)
    agree(loss, of_sequences[0])
    agree(gradient(loss, given), gradient(of_sequences[0], given))  # of one advantage a sample they are alike
    agree(metrics, of_sequences[1])


def test_gspo_token_with_advantages_of_tokens():
    """There a token's gradient is its own advantage's, which the sequence's mean is not."""
    given = padded()
    completions, slopes = completions_of(given["mask"]), {}
    log_probs, old = (packed(given[name], given["mask"]).nan_to_num() for name in ("log_probs", "old"))
    by_token = torch.linspace(-3, 3, len(log_probs))
    for level in ("sequence", "sequence_token"):
        policy = Policy(epsilon=9.0, importance_sampling_level=level, beta=0.0)
        terms = policy_losses(policy, log_probs, by_token, completions, baselines=BaselineLogProbs(old))
        loss, _ = normalised(terms, policy, completions, totals_of(given["mask"]))
        (slopes[level],) = torch.autograd.grad(loss, log_probs, retain_graph=True)
    ratios = completions.by_sample((log_probs - old).detach() * completions.mask)
    means = (ratios / completions.counts).exp()[completions.sample]
    share = completions.mask / completions.counts[completions.sample] / len(LENGTHS)
    agree(slopes["sequence_token"], -means * by_token * share)
    assert (slopes["sequence"] - slopes["sequence_token"]).abs().max() > 0.01


@pytest.mark.parametrize("loss_type", TRLS)
def test_micro_batches_and_ranks_add_up(loss_type):
    """Samples of two micro batches, of which the second has a sample and the first five: the shares' sum is the loss
    over all; for bnpo it is the mean of both means."""
    given = padded()
    parts = []
    for kept in (slice(0, 5), slice(5, 6)):
        part = given["mask"].clone()
        part[[number for number in range(6) if number not in range(6)[kept]]] = 0.0
        parts.append(part)
    policy = Policy(loss_type, max_completion_length=MAX_LENGTH)
    totals = Totals(len(LENGTHS), given["mask"].sum().item(), 2, len(LENGTHS))
    with mock.patch(f"{__name__}.totals_of", return_value=totals):
        shares = [run(policy, given | {"mask": part}) for part in parts]
    whole = run(policy, given)
    if loss_type == "bnpo":
        wholes = [run(policy, given | {"mask": part}) for part in parts]
        agree(sum(share for share, _ in shares), sum(loss for loss, _ in wholes) / 2)
    else:
        agree(sum(share for share, _ in shares), whole[0])
    for name in whole[1].keys() - {"loss"}:
        agree(sum(metrics[name] for _, metrics in shares), whole[1][name])


@pytest.mark.parametrize("level", ours.LEVELS)
def test_tokens_on_two_ranks(level):
    """Context parallelism: each rank has some of every sample's tokens, and their sums are of both ranks, as are the
    gradients of these sums."""
    given = padded()
    mask = given["mask"]
    whole = completions_of(mask)
    tensors = {name: packed(given[name], mask).nan_to_num() for name in ("log_probs", "old", "ref", "entropies")}
    sampled = packed(given["sampled"], mask).nan_to_num()
    barrier, sums = Barrier(2, timeout=20), {}
    for loss_type, mode in product(TRLS, (None, "sequence_mask")):
        policy = Policy(
            loss_type,
            importance_sampling_level=level,
            rollout_importance_sampling_mode=mode,
            max_completion_length=MAX_LENGTH,
        )

        def rank(number: int, policy: Policy = policy):
            mine = torch.arange(number, len(whole.sample), 2)

            def by_sample(values: Tensor) -> Tensor:
                sums[number] = torch.zeros(len(LENGTHS)).index_add(0, whole.sample[mine], values)
                barrier.wait()
                total = sums[0] + sums[1]
                barrier.wait()
                return total

            completions = Completions(whole.sample[mine], whole.mask[mine], whole.counts, by_sample)
            log_probs, old, ref, entropies = (tensor[mine] for tensor in tensors.values())
            terms = policy_losses(
                policy,
                log_probs,
                given["advantages"][completions.sample],
                completions,
                baselines=BaselineLogProbs(old, ref, sampled[mine]),
                entropies=entropies,
            )
            return normalised(terms, policy, completions, totals_of(mask))

        with ThreadPoolExecutor(2) as threads:
            shares = list(threads.map(rank, (0, 1)))
        loss, metrics = run(policy, given)
        found = shares[0][0] + shares[1][0]
        agree(found, loss)
        agree(gradient(found, given), gradient(loss, given))
        assert shares[0][1].keys() == metrics.keys()
        for name, value in metrics.items():
            agree(shares[0][1][name] + shares[1][1][name], value)


def test_far_from_the_others():
    """Where fp32 would overflow: losses and gradients are numbers still."""
    given = padded()
    for shift, (loss_type, level) in product((300.0, -300.0), product(TRLS, ours.LEVELS)):
        far = given | {"old": given["old"] - shift, "ref": given["ref"] + shift, "sampled": given["sampled"] - shift}
        policy = Policy(
            loss_type, importance_sampling_level=level, rollout_importance_sampling_mode="sequence_truncate"
        )
        loss, metrics = run(policy, far)
        assert torch.isfinite(torch.stack([loss, *metrics.values()])).all()
        assert torch.isfinite(gradient(loss, given)).all()


def test_names_that_it_does_not_know():
    given = padded()
    with pytest.raises(ValueError, match="--importance_sampling_level word: it has token, sequence, sequence_token"):
        run(Policy(importance_sampling_level="word"), given)
    policy = Policy(rollout_importance_sampling_mode="truncate")
    with pytest.raises(ValueError, match="--rollout_importance_sampling_mode truncate: it has token_truncate"):
        run(policy, given)
