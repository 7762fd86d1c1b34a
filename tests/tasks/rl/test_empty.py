"""Completions of no token at all: they have a reward, and nothing to be trained on."""

import json
import math
from pathlib import Path

import pytest

from tests.tasks.rl.runs import BASE, Place, Trained, assert_same_steps
from tests.tasks.rl.test_grpo_layouts import CP, DP, PACKED, PP, TP
from tests.tasks.rl.test_grpo_numbers import agree, reference

pytestmark = [pytest.mark.slow, pytest.mark.long]
EMPTY = f"--external_plugins rewards.py {Path(__file__).with_name('empty.py')}"


@pytest.fixture(autouse=True)
def a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", "3")


def empty(run: Trained) -> list[dict]:
    return [row for row in run.completions if not row["completion_ids"]]


def finite(run: Trained) -> None:
    numbers = [value for row in run.log for value in row.values() if isinstance(value, float)]
    assert all(map(math.isfinite, numbers))


def test_they_count_as_completions(place: Place) -> None:
    """As TRL counts them: in the means over completions, with a loss of 0."""
    run = place.run(f"{BASE} {EMPTY}")
    assert 3 < len(empty(run)) < 15
    for row in empty(run):
        assert (row["length"], row["completion"], row["finish_reason"]) == (0, "", "stop")
        assert row["rewards"]["short"] in (1, None)
    assert run.steps[0]["completions/min_length"] == 0
    agree(run, reference(place, run, ref="other"))
    dapo = place.run(f"{EMPTY} --loss_type dapo --importance_sampling_level sequence --top_entropy_quantile 0.5")
    finite(dapo)


@pytest.mark.parametrize("layout", [CP, f"{PP} {PACKED}", TP, DP])
def test_layouts(layout: str, place: Place) -> None:
    assert_same_steps(place.run(f"{BASE} {EMPTY} {layout}", 2), place.run(f"{BASE} {EMPTY}"))


@pytest.mark.parametrize("flags", ["", f"{PACKED} --loss_type bnpo --log_entropy true --kl_in_reward true"])
def test_nothing_else(flags: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to train on, and nothing is changed."""
    monkeypatch.setenv("EMPTY", "1")
    run = place.run(f"{EMPTY} --off_policy_sequence_mask_delta 0.1 {flags}".strip())
    assert len(empty(run)) == 24
    finite(run)
    assert [(row["loss"], row["grad_norm"]) for row in run.steps] == [(0.0, 0.0)] * 3
    start = place.start()
    assert all(tensor.equal(start[name]) for name, tensor in run.weights.items())


def test_a_run_goes_on_among_them(place: Place) -> None:
    """From a checkpoint with such completions that wait to be trained on."""
    flags = f"{EMPTY} --save_steps 1 --no_save_optim false --no_save_rng false"
    run = place.run(flags)
    line = place.line(flags, str(run.folder.relative_to(place.folder)))
    place.megatron(f"{line} --resume_from_checkpoint {run.folder}/checkpoint-1")
    log = [json.loads(line) for line in (run.folder / "logging.jsonl").read_text().splitlines()]
    steps = [row for row in log if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert [row["loss"] for row in steps] == [row["loss"] for row in run.steps]
