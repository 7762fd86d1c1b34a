"""Scoring: what functions are given, how their values add up, and what a user reads of one that fails."""

import asyncio
import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from megaswift.tasks.rewards.reward_fn import Reward, RewardError, RewardSample
from megaswift.tasks.rewards.scoring import score


def samples(*completions: str, **columns: list) -> list[RewardSample]:
    """Return samples of rows 10, 11, ..., with a token per character."""
    return [
        RewardSample(
            row=f"row {10 + i} of rows.jsonl",
            prompt=f"<user>{i}",
            messages=[{"role": "user", "content": str(i)}],
            completion=text,
            completion_ids=list(range(len(text))),
            columns={name: values[i] for name, values in columns.items()},
        )
        for i, text in enumerate(completions)
    ]


def only(function, *texts: str, timeout: float = 10, **columns: list) -> np.ndarray:
    """Return the rewards of one function named f."""
    return score([Reward("f", function)], [1], samples(*texts, **columns), timeout).rewards


def test_functions_get_the_keywords_that_they_name():
    given = {}

    def some(completions, level, messages, absent="default"):
        given["some"] = completions, level, messages, absent
        return [1] * 2

    def every(**columns):
        given["every"] = columns
        return [1] * 2

    class Called:
        def __call__(self, prompt, *, completion_ids):
            given["called"] = prompt, completion_ids
            return [1, 1]

    rewards = [Reward("some", some), Reward("every", every), Reward("called", Called())]
    batch = samples("ab", "c", level=[3, None], prompt=["of the row", "too"])
    score(rewards, [1, 1, 1], batch, 10)
    talks = [
        [{"role": "user", "content": "0"}, {"role": "assistant", "content": "ab"}],
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "c"}],
    ]
    assert given["some"] == (["ab", "c"], [3, None], talks, "default")
    assert given["called"] == (["<user>0", "<user>1"], [[0, 1], [0]])
    ids = [[0, 1], [0]]
    rows = given["every"].pop("trajectory_inputs")[""]  # of the last sample, since these have no ids
    assert [row["completions"] for row in rows] == ["c"]
    assert given["every"] == {
        "completions": ["ab", "c"],
        "completion_ids": ids,
        "response_token_ids": ids,
        "prompt": ["<user>0", "<user>1"],
        "messages": talks,
        "level": [3, None],
        "rollout_infos": [{}, {}],
        "finish_reason": ["stop", "stop"],
        "is_truncated": [False, False],
        "prompt_id": ["", ""],
        "request_id": ["", ""],
        "trainer_state": None,
    }
    assert len(batch[0].messages) == 1


def test_weighted_sums_leave_none_out():
    def first(completions):
        return [1.0, None, True, np.float32(0.25)]

    async def second(completions):
        return torch.tensor([10.0, 20.0, 30.0, 40.0])

    def third(completions):
        return (None, None, 2, None)

    rewards = [Reward("first", first), Reward("second", second), Reward("third", third)]
    scores = score(rewards, [1, 0.5, -3], samples(*"abcd"), 10)
    assert scores.rewards.tolist() == [6, 10, 10, 20.25]
    assert scores.rewards.dtype == np.float64
    np.testing.assert_array_equal(scores.by_function["first"], [1, math.nan, 1, 0.25])
    np.testing.assert_array_equal(scores.by_function["third"], [math.nan, math.nan, 2, math.nan])
    assert list(scores.by_function) == ["first", "second", "third"]


def test_no_samples_ask_nothing():
    def never(completions):
        raise AssertionError

    scores = score([Reward("never", never)], [1], [], 10)
    assert scores.rewards.shape == scores.by_function["never"].shape == (0,)


def test_functions_run_side_by_side():
    def sleeps(completions):
        time.sleep(1)
        return [1]

    async def waits(completions):
        await asyncio.sleep(1)
        return [1]

    async def sleeps_in_a_thread(completions):
        await asyncio.to_thread(time.sleep, 1)
        return [1]

    functions = [sleeps, waits, sleeps_in_a_thread, sleeps, waits]
    rewards = [Reward(str(i), function) for i, function in enumerate(functions)]
    start = time.monotonic()
    assert score(rewards, [1] * 5, samples("a"), 10).rewards.tolist() == [5]
    assert time.monotonic() - start < 4.5  # one after the other: 5


def test_an_async_function_keeps_its_loop():
    loops = []

    async def function(completions):
        loops.append(asyncio.get_running_loop())
        return [1]

    reward = Reward("f", function)
    for _ in range(2):
        score([reward], [1], samples("a"), 10)
    assert loops[0] is loops[1]


@pytest.mark.parametrize("is_async", [False, True])
def test_one_that_raises_is_named_with_its_row(is_async):
    def function(completions):
        return [1 / (text != "bad" + "x" * 300) for text in completions]

    async def later(completions):
        return function(completions)

    with pytest.raises(RewardError) as error:
        only(later if is_async else function, "good", "fine", "bad" + "x" * 300, "good")
    wanted = (
        rf"--reward_funcs f raised ZeroDivisionError: division by zero \(test_scoring.py, line \d+\) for row 12 of "
        rf"rows.jsonl, completion 'bad{'x' * 197}'. Fix it, or return None for completions that it cannot score"
    )
    assert re.fullmatch(wanted, str(error.value))
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_one_that_raises_for_several_alone():
    def function(completions):
        if len(completions) > 1:
            raise SystemExit("too many")
        return [1]

    with pytest.raises(
        RewardError, match=r"SystemExit: too many .* for 2 completions together \(the first is of row 10"
    ):
        only(function, "a", "b")


@pytest.mark.parametrize("kind", ["sync", "async", "blocking"])
def test_one_that_hangs_is_named_with_its_row(kind):
    def hangs(completions):
        for text in completions:
            while text == "bad":
                time.sleep(0.01)
        return [1] * len(completions)

    async def waits(completions):
        if "bad" in completions:
            await asyncio.sleep(1000)
        return [1] * len(completions)

    async def blocks(completions):
        return hangs(completions)

    function = {"sync": hangs, "async": waits, "blocking": blocks}[kind]
    start = time.monotonic()
    with pytest.raises(
        RewardError,
        match=r"--reward_funcs f did not return within 0.5 s \(it is at test_scoring.py, line \d+\). It hangs for "
        r"row 11 of rows.jsonl, completion 'bad'. Fix it, or raise --reward_timeout",
    ):
        only(function, "good", "bad", "good", timeout=0.5)
    assert time.monotonic() - start < 60


def test_one_that_is_slow_is_named():
    def slow(completions):
        time.sleep(0.1 * len(completions))
        return [1] * len(completions)

    with pytest.raises(RewardError, match=r"It is slow, for 10 completions together"):
        only(slow, *"abcdefghij", timeout=0.7)


def test_one_that_hangs_does_not_keep_the_process():
    code = """
import asyncio, time
from megaswift.tasks.rewards.reward_fn import Reward, RewardSample
from megaswift.tasks.rewards.scoring import score

def hangs(completions):
    time.sleep(1000)

async def in_a_thread(completions):
    await asyncio.to_thread(time.sleep, 1000)

for function in (hangs, in_a_thread):
    try:
        score([Reward("f", function)], [1], [RewardSample("row 0", "", [], "", [], {})], 0.2)
    except RuntimeError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("It hangs for row 0") == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, math.nan, 1.0], r"f returned nan for row 11 of rows.jsonl, completion 'b'. Fix it to return a finite"),
        ([1.0, 1.0, math.inf], r"f returned inf for row 12"),
        ([1.0, "1", 2.0], r"f returned '1' for row 11"),
        ([1.0, [1.0], 2.0], r"f returned \[1.0\] for row 11"),
        ([1.0, 2.0], r"f returned 2 values for 3 completions \(the first is of row 10"),
        ([1.0] * 4, r"f returned 4 values for 3 completions"),
        (None, r"f returned a NoneType for 3 completions"),
        (1.0, r"f returned a float for 3 completions"),
    ],
)
def test_what_is_no_reward_is_named(values, words):
    with pytest.raises(RewardError, match=words):
        only(lambda completions: values, "a", "b", "c")


def test_a_sample_of_which_none_says_anything():
    np.testing.assert_array_equal(only(lambda completions: [1.0, None, 2.0], "a", "b", "c"), [1, math.nan, 2])


def test_a_column_that_is_not_there_is_named():
    def function(completions, solution):
        return [1]

    with pytest.raises(ValueError, match=r"f: it requires the column solution, and .* has answer, level. .*--columns"):
        Reward("f", function).check_columns(["level", "answer"])
    Reward("f", function).check_columns(["solution"])
