"""Advantages of an episode's tokens: rewards at the last drawn one, KL at each, turns, and what has no reward."""

import math
from typing import Any

import numpy as np
import pytest
from megaswift.bridge.option_groups import compose
from megaswift.tasks.options import PpoOptions
from megaswift.tasks.rl.episode import Episode, from_tensors, sequences_of, to_tensors
from megaswift.tasks.rl.token_advantages import CriticAdvantageEstimator

PLAIN = {"whiten_advantages": False, "gamma": 0.9, "lam": 0.8}


def episode(mask: list[int], reward: float, seed: int = 0) -> Episode:
    rng = np.random.default_rng(seed)
    values, old, ref = (rng.normal(size=len(mask)).astype(np.float32) for _ in range(3))
    result = Episode("row 1", 0, np.arange(len(mask), dtype=np.int32), np.array(mask, np.float32), old, "stop", {})
    result.reward, result.values, result.old_log_probs, result.ref_log_probs = reward, values, old, ref
    return result


def estimate(episodes: list[Episode], **flags: Any) -> dict[str, float]:
    return CriticAdvantageEstimator(compose(PpoOptions, **flags))(episodes)


def by_hand(values: list[float], rewards: list[float]) -> list[float]:
    deltas = [r + 0.9 * v - u for r, u, v in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    return [sum(0.72 ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@pytest.mark.parametrize(("beta", "in_reward"), [(0.0, True), (0.1, False), (0.1, True)])
def test_an_episode_of_two_turns(beta: float, in_reward: bool) -> None:
    """The answer between them, and the prompt, have no part in it."""
    result = episode([0, 0, 1, 1, 0, 0, 1, 1, 1], reward=2.0)
    assert result.values is not None
    assert result.old_log_probs is not None
    assert result.ref_log_probs is not None
    metrics = estimate([result], beta=beta, kl_in_reward=in_reward, **PLAIN)
    drawn = [2, 3, 6, 7, 8]
    kl = (result.old_log_probs - result.ref_log_probs)[drawn] * (beta if in_reward else 0.0)
    values = result.values[drawn]
    advantages = by_hand(values.tolist(), (np.array([0, 0, 0, 0, 2.0]) - kl).tolist())
    expected, returns = np.zeros(9), np.zeros(9)
    expected[drawn], returns[drawn] = advantages, advantages + values
    np.testing.assert_allclose(result.advantages, expected, atol=1e-6)
    np.testing.assert_allclose(result.returns, returns, atol=1e-6)
    assert result.advantage == pytest.approx(np.mean(advantages))
    assert metrics["values/mean"] == pytest.approx(values.mean())
    assert metrics["returns/mean"] == pytest.approx(returns[drawn].mean())
    spread = np.var(returns[drawn] - values) / np.var(returns[drawn])
    assert metrics["critic/explained_variance"] == pytest.approx(1 - spread, rel=1e-5)


def test_an_episode_without_a_reward() -> None:
    """It has no advantage, and no part in the others' mean and deviation."""
    scored, other, unscored = episode([0, 1, 1], 1.0), episode([0, 1, 1, 1], -1.0, 1), episode([0, 1, 1], math.nan, 2)
    estimate([scored, unscored, other])
    assert unscored.advantages is not None
    assert not unscored.advantages.any()
    assert unscored.advantage == 0
    white = np.concatenate([e.advantages[1:] for e in (scored, other) if e.advantages is not None])
    assert white.mean() == pytest.approx(0, abs=1e-6)
    assert white.std(ddof=1) == pytest.approx(1, rel=1e-5)
    assert estimate([unscored]).keys() == {"reward_kl", "kl_coef"}
    assert not unscored.advantages.any()


def test_equal_rewards_and_values_leave_the_policy_alone() -> None:
    episodes = [episode([0, 1, 1], 1.0) for _ in range(3)]
    for one in episodes:
        one.values = np.ones(3, np.float32)
    estimate(episodes, beta=0.0)
    for one in episodes:
        np.testing.assert_allclose(one.advantages, 0, atol=1e-6)


def test_checkpoints_and_batches_have_them() -> None:
    episodes = [episode([0, 1, 1], 1.0), episode([0, 0, 1, 1], 0.5, 1)]
    estimate(episodes)
    for before, after in zip(episodes, from_tensors(to_tensors(episodes)), strict=True):
        for name in ("values", "returns", "advantages", "ref_log_probs"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    sequences = sequences_of(episodes, drop_truncated=False)
    np.testing.assert_array_equal(sequences.advantages[1], episodes[1].advantages)
    episodes[0].advantages = None
    assert sequences_of(episodes, drop_truncated=False).advantages == []
