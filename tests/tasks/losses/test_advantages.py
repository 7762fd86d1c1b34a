"""Advantages, against the papers' formulas in plain Python."""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.option_groups import compose
from megaswift.tasks.losses import policy as ours
from megaswift.tasks.losses.policy import advantages, spread
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.rl.advantages import AdvantageEstimator

GROUPS = torch.tensor([7, 3, 7, 3, 3, 7, 1, 7])  # of four, three and one
REWARDS = torch.tensor([1.0, 0.2, 0.0, 0.7, 0.9, 0.0, 2.5, 0.5], dtype=torch.float64)


def by_hand(estimator: str, scale: str) -> list[float]:
    """Sample by sample, in plain Python."""
    rewards, groups = REWARDS.tolist(), GROUPS.tolist()
    if estimator == "reinforce":  # compares nothing
        return rewards

    def deviation(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1)) if len(values) > 1 else 0.0

    def group(values: list[float], number: int) -> list[float]:
        return [value for value, its in zip(values, groups, strict=True) if its == groups[number]]

    found = []
    for number, reward in enumerate(rewards):
        peers = group(rewards, number)
        others = len(peers) - 1
        baseline = sum(peers) / len(peers)
        if estimator == "rloo":
            baseline = (sum(peers) - reward) / others if others else reward
        found.append(reward - baseline)
    measured = found if estimator == "reinforce_plus_plus" else rewards
    if scale == "none":
        return found
    over = [deviation(group(measured, i) if scale == "group" else measured) for i in range(len(rewards))]
    return [value / (each + 1e-4) for value, each in zip(found, over, strict=True)]


@pytest.mark.parametrize("scale", ours.SCALES)
@pytest.mark.parametrize("estimator", ours.ESTIMATORS)
def test_advantages(estimator, scale):
    found = advantages(REWARDS, GROUPS, estimator=estimator, scale=scale)
    assert found.tolist() == pytest.approx(by_hand(estimator, scale), abs=1e-12)
    single = advantages(REWARDS.float(), GROUPS, estimator=estimator, scale=scale)
    assert single.tolist() == pytest.approx(found.tolist(), abs=1e-6)


def test_scale_of_the_papers():
    for estimator, scale in (("grpo", "group"), ("rloo", "none"), ("reinforce_plus_plus", "batch")):
        assert torch.equal(
            advantages(REWARDS, GROUPS, estimator=estimator),
            advantages(REWARDS, GROUPS, estimator=estimator, scale=scale),
        )


def test_spread_is_trls():
    from trl.trainer.utils import nanstd

    for number in (7, 3):
        mine = number == GROUPS
        torch.testing.assert_close(spread(REWARDS, GROUPS)[mine], nanstd(REWARDS[mine]).expand(int(mine.sum())))
    assert spread(REWARDS, GROUPS)[6] == 0
    assert not spread(torch.full((4,), 0.3), torch.zeros(4, dtype=torch.int64)).any()


def test_equal_rewards_teach_nothing():
    groups = torch.arange(8) // 4
    for estimator, scale in product([name for name in ours.ESTIMATORS if name != "reinforce"], ours.SCALES):
        found = advantages(torch.full((8,), 0.1, dtype=torch.float64), groups, estimator=estimator, scale=scale)
        assert found.abs().max() < 1e-10


def test_one_completion_per_prompt_is_compared_with_the_batch():
    """REINFORCE++ (https://arxiv.org/abs/2501.03262, equation 7): over the batch's mean and standard deviation."""
    rewards = [1.0, 0.0, 0.5, math.nan, 2.5]
    episodes: list[Any] = [SimpleNamespace(reward=reward, kl_penalty=0.25) for reward in rewards]  # alike for all
    flags = {"num_generations": 1, "advantage_estimator": "reinforce_plus_plus", "reward_funcs": ["accuracy"]}
    AdvantageEstimator(compose(GrpoOptions, **flags))(episodes)
    deviation = math.sqrt((0.0 + 1.0 + 0.25 + 2.25) / 3)
    by_hand = [(reward - 1.0) / (deviation + 1e-4) for reward in (1.0, 0.0, 0.5, 1.0, 2.5)]
    assert [episode.advantage for episode in episodes] == pytest.approx(by_hand, abs=1e-12)
    assert [episode.group for episode in episodes] == [0, 1, 2, 3, 4]
