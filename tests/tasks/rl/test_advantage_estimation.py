"""Advantages of a rollout batch beside verl's and ROLL's formulas on padded completions, written down here."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from megaswift.bridge.option_groups import compose
from megaswift.tasks.losses.reward_scaling import RunningMoments, is_within_difficulty
from megaswift.tasks.options import GrpoOptions, PpoOptions
from megaswift.tasks.rl.advantages import AdvantageEstimator
from megaswift.tasks.rl.episode import Episode
from megaswift.tasks.rl.token_advantages import CriticAdvantageEstimator
from torch import Tensor

LENGTHS, PROMPT, WIDTH = (5, 2, 9, 3, 7, 4), 2, 9
REWARDS = [1.0, -0.5, 2.0, 0.25, 0.0, 3.0]
MASK = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double()


def episodes_of(rewards: list[float] = REWARDS, seed: int = 0) -> list[Episode]:
    """Completions with log-probabilities of the policy and of the reference, behind prompts of two tokens."""
    generator = np.random.default_rng(seed)
    episodes = []
    for length, reward in zip(LENGTHS, rewards, strict=True):
        mask = np.repeat(np.array([0, 1], np.float32), [PROMPT, length])
        old = generator.normal(-2, 1, PROMPT + length).astype(np.float32) * mask
        ref = (old + generator.normal(0.1, 0.5, PROMPT + length).astype(np.float32)) * mask
        tokens = np.arange(PROMPT + length, dtype=np.int32)
        episode = Episode("row 1", 0, tokens, mask, old, "stop", {}, reward=reward)
        episode.old_log_probs, episode.ref_log_probs = old, ref
        episodes.append(episode)
    return episodes


def padded(episodes: list[Episode], name: str) -> Tensor:
    """Numbers of the completions' tokens: fp64 [episodes, width]."""
    rows = [torch.from_numpy(getattr(episode, name)[PROMPT:]).double() for episode in episodes]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def estimator(**flags: Any) -> AdvantageEstimator:
    return AdvantageEstimator(compose(GrpoOptions, reward_funcs=["accuracy"], **{"num_generations": 1} | flags))


def advantages(episodes: list[Episode]) -> Tensor:
    """[episodes, width], 0 behind the end."""
    rows = [
        torch.full((length,), episode.advantage).double()
        if episode.advantages is None
        else torch.from_numpy(episode.advantages[PROMPT:]).double()
        for episode, length in zip(episodes, LENGTHS, strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def verls_penalty(old: Tensor, ref: Tensor, kind: str) -> Tensor:
    difference = old - ref
    return {
        "k1": difference,
        "abs": difference.abs(),
        "k2": difference**2 / 2,
        "k3": (-difference).exp() + difference - 1,
    }[kind] * MASK


def masked_whiten(values: Tensor) -> Tensor:
    """verl's and TRL's, over all tokens of MASK."""
    mean = (values * MASK).sum() / MASK.sum()
    variance = ((values - mean) ** 2 * MASK).sum() / (MASK.sum() - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * MASK


def returns_of(token_rewards: Tensor) -> Tensor:
    """verl's REINFORCE++ with gamma 1, from the last token to the first."""
    returns, running = torch.zeros_like(token_rewards), torch.zeros(len(token_rewards)).double()
    for place in range(WIDTH - 1, -1, -1):
        running = (token_rewards[:, place] + running) * MASK[:, place]
        returns[:, place] = running
    return returns


def token_rewards(rewards: list[float]) -> Tensor:
    """The score at the last token."""
    scores = torch.zeros(len(rewards), WIDTH).double()
    scores[torch.arange(len(rewards)), torch.tensor(LENGTHS) - 1] = torch.tensor(rewards).double()
    return scores


def close(actual: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("whitens", [False, True])
def test_reinforce_with_a_penalty_of_each_token(kind, whitens):
    """Whitened, it is verl's reinforce_plus_plus."""
    episodes = episodes_of()
    flags = {"advantage_estimator": "reinforce", "kl_in_reward": True, "beta": 0.3, "kl_estimator": kind}
    metrics = estimator(**flags, whiten_advantages=whitens)(episodes)
    penalties = verls_penalty(padded(episodes, "old_log_probs"), padded(episodes, "ref_log_probs"), kind)
    returns = returns_of(token_rewards(REWARDS) - 0.3 * penalties)
    close(advantages(episodes), masked_whiten(returns) if whitens else returns)
    means = [values.sum() / length for values, length in zip(penalties, LENGTHS, strict=True)]
    assert metrics == pytest.approx({"reward_kl": float(sum(means)) / 6, "kl_coef": 0.3}, abs=1e-6)
    sums = [0.3 * float(values.sum()) for values in penalties]
    assert [episode.kl_penalty for episode in episodes] == pytest.approx(sums, abs=1e-6)


def test_penalty_of_a_reward_is_k1_unless_it_is_said():
    batches = [episodes_of(), episodes_of()]
    for episodes, flags in zip(batches, ({}, {"kl_estimator": "k1"}), strict=True):
        estimator(advantage_estimator="reinforce", kl_in_reward=True, **flags)(episodes)
    assert torch.equal(*map(advantages, batches))


def test_plain_reinforce():
    episodes = episodes_of()
    assert estimator(advantage_estimator="reinforce", beta=0.0)(episodes) == {}
    close(advantages(episodes), torch.tensor(REWARDS).double()[:, None] * MASK)
    assert all(episode.advantages is None for episode in episodes)


def test_turns_that_the_model_did_not_draw_are_skipped():
    episodes = episodes_of()
    mask = episodes[2].loss_mask
    mask[5:8] = 0.0
    estimator(advantage_estimator="reinforce", kl_in_reward=True, beta=0.3)(episodes)
    old, ref, estimated = episodes[2].old_log_probs, episodes[2].ref_log_probs, episodes[2].advantages
    assert old is not None
    assert ref is not None
    assert estimated is not None
    drawn = np.flatnonzero(mask)
    expected = [
        2.0 - 0.3 * sum(float(old[later] - ref[later]) for later in drawn[place:]) for place in range(len(drawn))
    ]
    assert estimated[drawn].tolist() == pytest.approx(expected, abs=1e-6)
    assert not estimated[mask == 0].any()


def test_group_means_whitened():
    """verl's reinforce_plus_plus_baseline."""
    episodes = episodes_of()
    flags = {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "none", "num_generations": 3, "beta": 0.0}
    estimator(**flags, whiten_advantages=True)(episodes)
    groups = torch.tensor(REWARDS).double().view(-1, 3)
    centered = (groups - groups.mean(1, keepdim=True)).flatten()
    close(advantages(episodes), masked_whiten(centered[:, None] * MASK))
    assert all(episode.advantages is None for episode in episodes)


def test_whitening_is_over_what_is_trained():
    """Not over a truncated completion that is filtered out, nor over one without a reward."""
    episodes = episodes_of([*REWARDS[:4], math.nan, REWARDS[5]])
    episodes[1].finish_reason = "length"
    estimator(advantage_estimator="reinforce", beta=0.0, whiten_advantages=True, overlong_filter=True)(episodes)
    values = [value for index in (0, 2, 3, 5) for value in [REWARDS[index]] * LENGTHS[index]]
    expected = [(REWARDS[index] - np.mean(values)) / np.std(values, ddof=1) for index in (0, 2, 3, 5)]
    assert [episodes[index].advantage for index in (0, 2, 3, 5)] == pytest.approx(expected, abs=1e-6)
    assert episodes[4].advantage == 0


def test_clipped_after_whitening():
    """ROLL's order: rewards are normalized and clipped, advantages whitened and clipped."""
    episodes = episodes_of()
    flags = {"advantage_estimator": "reinforce", "kl_in_reward": True, "beta": 0.3, "whiten_advantages": True}
    metrics = estimator(**flags, reward_clip=1.5, advantage_clip=0.8)(episodes)
    penalties = verls_penalty(padded(episodes, "old_log_probs"), padded(episodes, "ref_log_probs"), "k1")
    clipped_rewards = [min(reward, 1.5) for reward in REWARDS]
    whitened = masked_whiten(returns_of(token_rewards(clipped_rewards) - 0.3 * penalties))
    close(advantages(episodes), whitened.clamp(-0.8, 0.8))
    share = ((whitened.abs() > 0.8) * MASK).sum() / MASK.sum()
    assert 0 < share < 1
    assert metrics["advantages/clip_ratio"] == pytest.approx(share.item())
    assert metrics["rewards/clip_ratio"] == pytest.approx(2 / 6)
    assert [episode.reward for episode in episodes] == REWARDS  # what is logged


def gae_of(token_rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """verl's advantages and returns, from the last token to the first."""
    advantages, last, later = (
        torch.zeros_like(values),
        torch.zeros(len(values)).double(),
        torch.zeros(len(values)).double(),
    )
    for place in range(WIDTH - 1, -1, -1):
        kept = MASK[:, place]
        delta = token_rewards[:, place] + gamma * later - values[:, place]
        last = (delta + gamma * lam * last) * kept + (1 - kept) * last
        later = values[:, place] * kept + (1 - kept) * later
        advantages[:, place] = last * kept
    return advantages, (advantages + values) * MASK


def test_switches_with_a_critic():
    """PPO: a clipped reward, an adaptive penalty of each token, whitened and clipped advantages."""
    flags = {"kl_estimator": "abs", "target_kl": 0.1, "kl_horizon": 30, "beta": 0.3, "gamma": 0.9, "lam": 0.8}
    options = compose(PpoOptions, reward_funcs=["accuracy"], reward_clip=1.5, advantage_clip=1.1, **flags)
    estimate, expected = CriticAdvantageEstimator(options), Controller(0.3, 0.1, 30)
    for seed in range(3):
        episodes = episodes_of(seed=seed)
        for episode in episodes:
            values = np.random.default_rng(seed).normal(0, 1, len(episode.tokens))
            episode.values = values.astype(np.float32)
        metrics = estimate(episodes)
        penalties = verls_penalty(padded(episodes, "old_log_probs"), padded(episodes, "ref_log_probs"), "abs")
        scores = token_rewards([min(reward, 1.5) for reward in REWARDS]) - expected.value * penalties
        unscaled, returns = gae_of(scores, padded(episodes, "values"), 0.9, 0.8)
        close(advantages(episodes), masked_whiten(unscaled).clamp(-1.1, 1.1))
        close(padded(episodes, "returns"), returns)
        assert metrics["kl_coef"] == pytest.approx(expected.value)
        assert 0 < metrics["advantages/clip_ratio"] < 1
        expected.update(float((penalties.sum(1) / torch.tensor(LENGTHS)).mean()), len(episodes))


def test_running_normalization():
    """Over all rewards of two batches; what has none changes nothing."""
    estimate = estimator(advantage_estimator="reinforce", beta=0.0, normalize_rewards=True)
    batches = [REWARDS, [5.0, math.nan, -3.0, 0.5, 1.0, 2.0]]
    for count in (1, 2):
        episodes = episodes_of(batches[count - 1])
        estimate(episodes)
        values = [value for batch in batches[:count] for value in batch if not math.isnan(value)]
        for episode in episodes:
            expected = (episode.reward - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
            assert episode.advantage == pytest.approx(0.0 if math.isnan(episode.reward) else expected, abs=1e-9)


def test_moments_of_few_values():
    moments = RunningMoments()
    moments.update(np.array([]))
    assert (moments.count, moments.deviation) == (0, 0.0)
    moments.update(np.array([3.0]))
    assert moments.normalize(np.array([3.0])).tolist() == [0.0]
    moments.update(np.full(5, 3.0))
    assert moments.normalize(np.array([3.0])).tolist() == [0.0]


class Controller:
    """verl's adaptive KL controller."""

    def __init__(self, coefficient: float, target: float, horizon: int):
        self.value, self.target, self.horizon = coefficient, target, horizon

    def update(self, kl: float, completions: int) -> None:
        error = np.clip(kl / self.target - 1, -0.2, 0.2)
        self.value *= 1 + error * completions / self.horizon


@pytest.mark.parametrize("target", [0.01, 0.11, 5.0])
def test_adaptive_coefficient(target):
    """A batch has the coefficient of the ones before it; saved and restored in the midst."""
    flags = {"advantage_estimator": "reinforce", "kl_in_reward": True, "kl_estimator": "k3", "beta": 0.3}
    flags |= {"target_kl": target, "kl_horizon": 40}
    estimate, expected = estimator(**flags), Controller(0.3, target, 40)
    for seed in range(4):
        episodes = episodes_of(seed=seed)
        metrics = estimate(episodes)
        penalties = verls_penalty(padded(episodes, "old_log_probs"), padded(episodes, "ref_log_probs"), "k3")
        close(advantages(episodes), returns_of(token_rewards(REWARDS) - expected.value * penalties))
        kl = float((penalties.sum(1) / torch.tensor(LENGTHS)).mean())
        assert metrics == pytest.approx({"reward_kl": kl, "kl_coef": expected.value})
        expected.update(kl, len(episodes))
        restored = estimator(**flags)
        restored.load(estimate.state())
        estimate = restored
    assert abs(estimate.kl_coefficient / 0.3 - 1) > 0.01


def test_coefficient_of_a_resumed_run_is_betas():
    before = estimator(kl_in_reward=True, beta=0.3, num_generations=2)
    after = estimator(kl_in_reward=True, beta=0.1, num_generations=2)
    after.load(before.state())
    assert after.kl_coefficient == 0.1


def test_difficulty():
    """Strictly between the bounds, as in ROLL; rewards that are missing count for nothing."""
    rewards = np.array([0.0, 0.2, 1.0, 1.0, 0.0, 1.0, math.nan, 0.5, math.nan, math.nan])
    groups = np.arange(10) // 2
    kept = is_within_difficulty(rewards, groups, 0.1, 1.0)
    assert kept[::2].tolist() == [False, False, True, True, True]
    assert kept[::2].tolist() == kept[1::2].tolist()


def test_prompts_outside_of_the_range_have_no_loss():
    episodes = episodes_of([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    metrics = estimator(num_generations=2, difficulty_range=[0.1, 0.9], whiten_advantages=True, beta=0.0)(episodes)
    trained = [episode.trained_tokens(drop_truncated=False).any() for episode in episodes]
    assert trained == [False, False, True, True, False, False]
    assert metrics == {"completions/excluded_ratio": pytest.approx(2 / 3)}
    values = [episodes[2].advantage] * LENGTHS[2] + [episodes[3].advantage] * LENGTHS[3]
    assert (np.mean(values), np.std(values, ddof=1)) == pytest.approx((0.0, 1.0), abs=1e-6)
