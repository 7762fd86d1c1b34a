"""Scores of Countdown: facts of TinyZero's rule, and Python's own arithmetic."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megaswift.tasks.rewards.rules.countdown import score_countdown, value_of
from megaswift.tasks.rewards.rules.sample import RuleSample

TASK = {"target": 24, "numbers": [8, 4, 8]}


def sample(completion: str, truth: object = TASK) -> RuleSample:
    return RuleSample(completion, "question", {"solution": truth})


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>so</think>\n<answer>(8 - 4) * 8 - 8</answer>", 0.1),  # one 8 too many
        ("<answer>8 * 4 - 8</answer>", 1.0),
        ("<answer> 8*4-8 </answer>", 1.0),
        ("no\n<answer>1</answer> or <answer>8*4-8</answer>", 1.0),  # the last one counts
        ("<answer>8*4-8</answer>\nDone.", 0.0),  # not in the last line
        ("<answer>8 + 4 + 8</answer>", 0.1),  # another value
        ("<answer>8 * 4</answer>", 0.1),  # a number is left over
        ("<answer>8 * 4 - 8 = 24</answer>", 0.1),
        ("<answer>8 ** 4 - 8</answer>", 0.1),
        ("<answer>8 / (4 - 8 / 2)</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("<answer>" + "(" * 5000 + "8*4-8</answer>", 0.1),
        ("<answer>" + "9" * 5000 + "</answer>", 0.1),
        ("8*4-8", 0.0),
        ("", 0.0),
    ],
)
def test_countdown(completion: str, score: float) -> None:
    samples = [sample(completion), sample(completion, json.dumps(TASK))]
    assert score_countdown(samples, 0.1) == [score, score]


def test_another_score_of_a_wrong_equation() -> None:
    assert score_countdown([sample("<answer>8 + 4 + 8</answer>"), sample("8")], 0.5) == [0.5, 0.0]


@pytest.mark.parametrize("truth", [None, "24", {"target": 24}, {"target": None, "numbers": [1]}])
def test_a_row_without_numbers_has_no_score(truth: object) -> None:
    assert score_countdown([sample("<answer>8*4-8</answer>", truth)], 0.1) == [None]


@given(st.recursive(
    st.integers(0, 99).map(str),
    lambda parts: st.tuples(parts, st.sampled_from("+-*/"), parts).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
    max_leaves=6,
))  # fmt: skip
def test_values_are_those_of_python(equation: str) -> None:
    try:
        expected = eval(equation)
    except ZeroDivisionError:
        expected = None
    assert value_of(equation) == pytest.approx(expected)


@pytest.mark.parametrize("equation", ["2 ** 3", "7 // 2", "__import__('os')", "1 2", "-", "+" * 99_999])
def test_other_expressions_have_no_value(equation: str) -> None:
    assert value_of(equation) is None
