"""Rules as rewards of their own, for rows without a source."""

import pytest
from megaswift.tasks.options.rewards import RewardOptions
from megaswift.tasks.rewards.load import load_rewards, signatures
from megaswift.tasks.rewards.reward_fn import RewardSample
from megaswift.tasks.rewards.scoring import score

TASK = '{"target": 12, "numbers": [8, 4]}'


@pytest.mark.parametrize(
    ("name", "completion", "columns", "expected"),
    [
        ("countdown", "<answer>8 + 4</answer>", {"solution": TASK}, 1.0),
        ("countdown", "<answer>8 - 4</answer>", {"reward_model": {"ground_truth": TASK}}, 0.1),
        ("gsm8k", "#### 72", {"solution": "48 + 24\n#### 72"}, 1.0),
        ("gsm8k", "72", {"ground_truth": "72", "data_source": "other"}, 0.0),
    ],
)
def test_every_row_has_the_same_rule(name: str, completion: str, columns: dict, expected: float) -> None:
    options = RewardOptions(reward_funcs=[name])
    row = RewardSample("row 1", "", [], completion, [1], columns)
    assert score(load_rewards(options, options), [1.0], [row], 60.0).by_function[name].tolist() == [expected]


@pytest.mark.parametrize("name", ["countdown", "gsm8k"])
def test_data_without_a_truth_is_refused(name: str) -> None:
    [signature] = signatures(RewardOptions(reward_funcs=[name]))
    with pytest.raises(ValueError, match=f"{name}: it requires the column reward_model or ground_truth or solution"):
        signature.check_columns(["prompt", "answer"])
