"""Functions with verl's signature as rewards."""

from pathlib import Path

import numpy as np
import pytest
from megaswift.tasks.options.rewards import RewardOptions
from megaswift.tasks.rewards.load import check_rewards, load_rewards, signatures
from megaswift.tasks.rewards.reward_fn import RewardSample
from megaswift.tasks.rewards.scoring import score
from megaswift.tasks.system.plugins import load_plugins

PLUGIN = """
def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    return {"score": float(solution_str == ground_truth) + extra_info.get("bonus", 0), "acc": 1}


def verl_plain(data_source, solution_str, ground_truth):
    return solution_str == ground_truth


def not_a_score(completions):
    return completions
"""
ROWS = (
    {"data_source": "sums", "reward_model": {"ground_truth": "3"}, "extra_info": {"bonus": 0.5}},
    {"data_source": "sums", "reward_model": {"ground_truth": "4"}, "extra_info": None},
    {"data_source": None, "reward_model": {"ground_truth": "4"}, "extra_info": None},
)


def test_verls_functions_are_rewards(tmp_path: Path) -> None:
    file = tmp_path / "scores.py"
    file.write_text(PLUGIN)
    load_plugins([str(file)])
    options = RewardOptions(reward_funcs=["verl_score", "verl_plain"])
    check_rewards(options)
    samples = [RewardSample(f"row {n}", "", [], "3", [1], row) for n, row in enumerate(ROWS)]
    for reward in signatures(options):
        reward.check_columns(["data_source", "reward_model"])
        with pytest.raises(ValueError, match="it requires the column data_source or tag"):
            reward.check_columns(["reward_model"])
    scores = score(load_rewards(options, options), [1.0, 1.0], samples, 60.0).by_function
    np.testing.assert_array_equal(scores["verl_score"], [1.5, 0, np.nan])
    np.testing.assert_array_equal(scores["verl_plain"], [1, 0, np.nan])


def test_other_functions_have_to_be_registered() -> None:
    with pytest.raises(ValueError, match="--reward_funcs not_a_score: no such reward"):
        check_rewards(RewardOptions(reward_funcs=["not_a_score"]))
