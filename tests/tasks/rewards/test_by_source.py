"""Rules by source: which source has which rule, and what the reward gives for mixed batches."""

import pytest
from megaswift.tasks.options.rewards import RewardOptions
from megaswift.tasks.rewards.by_source import RULES, SOURCES, BySource, rule_of, source_of
from megaswift.tasks.rewards.load import check_rewards, load_rewards, signatures
from megaswift.tasks.rewards.reward_fn import RewardError, RewardSample
from megaswift.tasks.rewards.scoring import score

TESTS = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
ECHO = "```python\nprint(input())\n```"
ONE = "```python\nprint(1)\n```"
ROWS = [  # columns, completion, score
    ({"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}, "#### 72", 1.0),
    ({"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}, r"\boxed{72}", 0.0),
    (
        {"data_source": "DigitalLearningGmbH/MATH-lighteval", "reward_model": {"ground_truth": "(1,2)"}},
        r"\boxed{(1, 2)}",
        1.0,
    ),
    ({"data_source": "agentica-org/DeepScaleR-Preview-Dataset", "ground_truth": "7"}, r"\boxed{8}", 0.0),
    ({"data_source": "aime_2024", "solution": "33"}, r"\boxed{033}", 1.0),
    ({"tag": "deepmath_103k", "ground_truth": "0"}, r"\boxed{0}", 1.0),
    ({"tag": "crossthinkqa", "ground_truth": "C"}, "The answer is C", 0.5),
    ({"data_source": "countdown", "ground_truth": {"target": 3, "numbers": [1, 2]}}, "<answer>1 + 2</answer>", 1.0),
    ({"tag": "ifeval", "ground_truth": '{"func_name": "validate_no_commas"}'}, "none here", 1.0),
    ({"data_source": "taco", "reward_model": {"ground_truth": TESTS}}, ONE, 0.5),
    ({"tag": "KodCode", "test_cases": [{"stdin": "1", "expected_stdout": "1"}]}, ECHO, 1.0),
    ({"data_source": "codecontests", "tag": "ifeval", "ground_truth": TESTS}, ECHO, 1.0),  # data_source goes before
    ({"ground_truth": "7"}, r"\boxed{7}", None),  # no source
    ({"tag": "deepmath_103k"}, r"\boxed{7}", None),  # no truth
]


def samples(rows) -> list[RewardSample]:
    names = {name for columns, *_ in rows for name in columns}
    messages = [{"role": "user", "content": "What is it?"}]
    return [
        RewardSample(f"row {i + 1}", "", messages, text, [1], {name: columns.get(name) for name in names})
        for i, (columns, text, *_) in enumerate(rows)
    ]


def scores(rows, **options: object):
    rewards = RewardOptions(reward_funcs=["by_source"], **options)
    check_rewards(rewards)
    return score(load_rewards(rewards, rewards), [1.0], samples(rows), 60.0)


def test_a_batch_of_mixed_sources():
    values = scores(ROWS).by_function["by_source"].tolist()
    assert [None if value != value else value for value in values] == [score for *_, score in ROWS]


@pytest.mark.parametrize("source", ["my/set", "openai/gsm8k-hard", "hiyouga/geometry3k", "MATH"])
def test_a_source_without_a_rule_ends_the_run(source):
    rows = [*ROWS, ({"data_source": source, "ground_truth": "1"}, "1", None)]
    with pytest.raises(RewardError) as raised:
        scores(rows)
    message = str(raised.value)
    assert message.startswith(f"--reward_funcs by_source: no rule for the source {source!r}. ")
    assert f"""--source_rules '{{"{source}": "math"}}'""" in message
    assert all(name in message for name in (*RULES, *SOURCES))


def test_rules_of_further_sources():
    rows = [
        ({"data_source": "my/set", "ground_truth": "1"}, r"\boxed{1}", 1.0),
        ({"data_source": "my/other", "ground_truth": "1"}, "#### 1", 1.0),
        ({"data_source": "left", "ground_truth": "1"}, "#### 1", None),
        ({"data_source": "openai/gsm8k", "ground_truth": "1"}, r"\boxed{1}", 1.0),
    ]
    rules = {"my/set": "math", "my/*": "gsm8k", "left": "none", "openai/gsm8k": "math"}
    values = scores(rows, source_rules=rules).rewards.tolist()
    assert [None if value != value else value for value in values] == [1.0, 1.0, None, 1.0]


def test_a_judge(judge):
    rows = [
        ({"tag": "RLVR", "ground_truth": "Paris"}, "Paris", 1.0),
        ({"tag": "RLVR", "ground_truth": "Paris"}, "Rome", 0.0),
        ({"tag": "math", "ground_truth": "1"}, "1", 1.0),
    ]
    options = {"judge_server": judge.url, "judge_prompt": "{response}|{reference}"}
    assert scores(rows, **options).rewards.tolist() == [score for *_, score in rows]
    judge.statuses = [401]
    with pytest.raises(RewardError, match=rf"^--judge_server {judge.url}: no verdict \(it replied with status 401"):
        scores(rows, judge_model="judge-7b", **options)


def test_the_judge_needs_a_server():
    with pytest.raises(RewardError, match=r"by_source: --judge_server: missing, and the rule judge asks it. Set"):
        scores([({"tag": "RLVR", "ground_truth": "Paris"}, "Paris", None)])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"source_rules": {"a": "maths"}}, "--source_rules a: no such rule as maths. Use one of gsm8k, math"),
        ({"source_rules": {"a": "judge"}}, "--source_rules: the rule judge asks a server. Set --judge_server"),
        ({"judge_server": "nowhere"}, "--judge_server nowhere: not a URL"),
        ({"judge_server": "http://h", "judge_prompt": "What?"}, "--judge_prompt 'What\\?': has no"),
    ],
)
def test_options_are_checked_before_the_run(options, problem):
    with pytest.raises(ValueError, match=problem):
        check_rewards(RewardOptions(reward_funcs=["by_source"], **options))


def test_a_rule_that_raises_ends_the_run_with_the_row():
    rows = [ROWS[0], ({"tag": "ifeval", "ground_truth": '{"func_name": "validate_nonsense"}'}, "a", None)]
    with pytest.raises(
        RewardError, match=r"by_source raised ValueError: no such instruction: validate_nonsense .* row 2"
    ):
        scores(rows)


@pytest.mark.parametrize(
    ("columns", "missing"),
    [
        ({"data_source", "reward_model"}, None),
        ({"tag", "ground_truth"}, None),
        ({"tag", "test_cases"}, None),
        ({"tag", "solution", "other"}, None),
        ({"reward_model", "ground_truth"}, "data_source or tag"),
        ({"data_source", "answer"}, "reward_model or ground_truth or solution"),
        (set(), "data_source or tag"),
    ],
)
def test_columns(columns, missing):
    [signature] = signatures(RewardOptions(reward_funcs=["by_source"]))
    [reward] = load_rewards(RewardOptions(reward_funcs=["by_source"]), RewardOptions())
    assert signature.required_alternatives == reward.required_alternatives
    if missing is None:
        return signature.check_columns(columns)
    with pytest.raises(ValueError, match=f"by_source: it requires the column {missing}.*, and the dataset has"):
        signature.check_columns(columns)


@pytest.mark.parametrize(
    ("row", "source"),
    [
        ({"data_source": "a", "tag": "b"}, "a"),
        ({"data_source": None, "tag": "b"}, "b"),
        ({"data_source": "", "tag": "b"}, "b"),
        ({"tag": None}, None),
        ({}, None),
        ({"data_source": 7}, "7"),
    ],
)
def test_source_of_a_row(row, source):
    assert source_of(row) == source


def test_names_go_before_patterns():
    assert rule_of("aime_x", {"aime*": "math", "aime_x": "gsm8k"}) == "gsm8k"
    assert rule_of("AIME2025", SOURCES) == "math"
    assert rule_of("livecodebench_v6", SOURCES) == "code"
    assert rule_of("Openai/gsm8k", SOURCES) is None


def test_each_source_has_a_known_rule():
    assert set(SOURCES.values()) <= set(RULES)
    assert set(RULES) - set(SOURCES.values()) == {"none"}
    assert BySource.required_alternatives
