"""Rows that no reward can judge: what is known before a run, and what is said in its midst."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from megaswift.tasks.rewards.reward_fn import Reward, RewardError, RewardSample
from megaswift.tasks.rewards.unscored import ROWS, UnscoredMonitor, check_columns
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import Prepared, prepare
from transformers import AutoTokenizer

from tests import tiny


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MODELSCOPE_CACHE", raising=False)


def prepared(folder: Path, train: list, val: list) -> Prepared:
    """Rows with these solutions."""
    tiny.save_tokenizer(folder)
    names = []
    for name, solutions in (("train", train), ("val", val)):
        rows = [{"query": "?", "solution": solution} for solution in solutions]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append([str(folder / f"{name}.jsonl")] if rows else [])
    options = PrepareOptions(dataset=names[0], val_dataset=names[1])
    return prepare(options, AutoTokenizer.from_pretrained(folder), stage="prompts")


def right(completions, solution):
    return [1.0] * len(completions)


def anything(completions, solution=None):
    return [1.0] * len(completions)


RIGHT, ANYTHING = Reward("right", right), Reward("anything", anything)


def test_rows_that_lack_the_column_are_counted(tmp_path):
    data = prepared(tmp_path, ["1", None, "3", "4"], ["1", None])
    train, val = check_columns([RIGHT], data, evaluates=True)
    assert "right cannot score 1 of the 4 rows to train on, which lack solution (the first is row 2 of " in train
    assert "right cannot score 1 of the 2 rows to evaluate on, which lack solution (the first is row 2 of " in val
    assert check_columns([RIGHT, ANYTHING], data, evaluates=True) == []
    assert len(check_columns([RIGHT], data, evaluates=False)) == 1
    assert check_columns([], data, evaluates=True) == []  # a teacher alone scores nothing


def test_rows_that_all_lack_it_are_refused(tmp_path):
    data = prepared(tmp_path, ["1", "2"], [None, None])
    with pytest.raises(ValueError, match=r"right cannot score any of the 2 rows to evaluate on, .* to --val_dataset"):
        check_columns([RIGHT], data, evaluates=True)
    assert check_columns([RIGHT], data, evaluates=False) == []
    with pytest.raises(ValueError, match=r"right cannot score any of the 2 rows to train on, which lack solution"):
        check_columns([RIGHT], prepared(tmp_path, [None, None], ["1"]), evaluates=True)


def samples(rows: int) -> list[RewardSample]:
    return [RewardSample(f"row {i + 1} of q.jsonl", "", [], "hm", [], {"solution": "B"}) for i in range(rows)]


def test_the_first_is_told_of_once():
    looks, rewards = UnscoredMonitor(["accuracy"]), np.array([1.0, math.nan, math.nan])
    assert looks.check(samples(1), np.array([0.0])) is None
    note = looks.check(samples(3), rewards)
    assert "row 2 of q.jsonl, completion 'hm' (solution: 'B')" in str(note)
    assert looks.check(samples(3), rewards) is None
    assert looks.check(samples(20), np.full(20, math.nan)) is None  # it has judged others


def test_a_run_that_can_judge_nothing_ends():
    looks = UnscoredMonitor(["accuracy"])
    for _ in range(ROWS - 1):
        looks.check(samples(1), np.array([math.nan]))
    with pytest.raises(RewardError, match=r"accuracy: no completion so far has a score.* row 1 of q.jsonl"):
        looks.check(samples(2)[1:], np.array([math.nan]))  # it names the first, not this one
