"""Programs in answers, tests in rows, and their scores."""

import json

import pytest
from megaswift.tasks.options.rewards import RewardOptions
from megaswift.tasks.rewards.rules.code import CodeRule, program_of, row_tests
from megaswift.tasks.rewards.rules.sample import RuleSample
from megaswift.tasks.rewards.rules.sandbox import ProgramTest


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```py\n1\n```\n```python\n2\n```", "2\n"),  # the last one counts
        ("```python\n1\n```\nOutput:\n```\n2\n```", "1\n"),
        ("```\n1\n```", "1\n"),
        ("```cpp\n1\n```", "1\n"),
        ("```python\nprint(1)\n", "print(1)\n"),  # cut off
        ("print(1)", "print(1)"),
    ],
)
def test_program_of_an_answer(answer, program):
    assert program_of(answer) == program


def sample(completion: str = "", **columns: object) -> RuleSample:
    return RuleSample(completion, "", columns)


APPS = {"inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}
PAIRS = [ProgramTest(text="1\n2", expected="3"), ProgramTest(text="3\n4", expected="7")]
CALLS = [ProgramTest(function="add", arguments=(1, 2), expected=3)]


@pytest.mark.parametrize(
    ("columns", "tests"),
    [
        ({"reward_model": {"ground_truth": json.dumps(APPS)}}, PAIRS),
        ({"ground_truth": APPS | {"fn_name": None}}, PAIRS),
        ({"ground_truth": {"inputs": [["1", "2"]], "outputs": [["3"]]}}, PAIRS[:1]),  # lines
        ({"ground_truth": {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}}, CALLS),
        ({"ground_truth": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "Solution.add"}}, CALLS),
        (
            {"ground_truth": {"inputs": ['"a"'], "outputs": ["a"], "fn_name": "f"}},
            [ProgramTest(function="f", arguments=("a",), expected="a")],
        ),
        ({"ground_truth": {"assert_case": ["assert f(1)"]}}, [ProgramTest(assertions="assert f(1)")]),
        (
            {"ground_truth": '["assert f(1)", "assert f(2)"]'},
            [ProgramTest(assertions=f"assert f({n})") for n in (1, 2)],
        ),
        (  # ROLL: the ground truth is a solution there
            {"test_cases": '[{"assert_code": "assert f(1)"}]', "ground_truth": '["def f(x): ..."]'},
            [ProgramTest(assertions="assert f(1)")],
        ),
        (
            {"test_cases": [{"stdin": "1\n2", "expected_stdout": "3"}], "test_case_function": ""},
            PAIRS[:1],
        ),
        ({"test_cases": [{"stdin": "1\n2", "expected_stdout": "3"}], "test_case_function": "None"}, PAIRS[:1]),
        ({"test_cases": [{"stdin": "1\n2", "expected_output": "3"}], "test_case_function": "add"}, CALLS),
        ({"ground_truth": None}, []),
        ({}, []),
    ],
)
def test_tests_of_a_row(columns, tests):
    assert list(row_tests(sample(**columns))) == tests


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"ground_truth": "42 is it"}, "unknown form: '42 is it'"),
        ({"ground_truth": {"tests": []}}, "unknown form"),
        ({"test_cases": [{"input": 1}]}, "a test has an unknown form"),
        ({"ground_truth": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"ground_truth": {"inputs": [7], "outputs": [1], "fn_name": "f"}}, "arguments of f are neither .* lines: '7'"),
        ({"ground_truth": {"inputs": ["a"], "outputs": [1], "fn_name": "f"}}, "arguments of f are neither .*: 'a'"),
    ],
)
def test_tests_of_unknown_form(columns, problem):
    with pytest.raises(ValueError, match=problem):
        list(row_tests(sample(**columns)))


RIGHT = "```python\nprint(int(input()) + int(input()))\n```"
HALF = "```python\nprint(3)\n```"
WRONG = "```python\nprint(0)\n```"


def test_scores():
    samples = [sample(text, ground_truth=APPS) for text in (RIGHT, HALF, WRONG, "", f"<think>{RIGHT}</think>{WRONG}")]
    samples += [sample(RIGHT), sample(f"<think>{WRONG}</think>{RIGHT}", ground_truth=APPS)]
    options = RewardOptions()
    assert CodeRule(options, gives_shares=False)(samples) == [1, 0, 0, 0, 0, None, 1]
    assert CodeRule(options, gives_shares=True)(samples) == [1, 0.5, 0, 0, 0, None, 1]


def test_programs_that_no_time_is_left_for_have_no_score():
    waiting = [sample("import time\ntime.sleep(99)", ground_truth=APPS)] * 40
    assert CodeRule(RewardOptions(reward_timeout=1.0), gives_shares=False)(waiting) == [None] * 40
