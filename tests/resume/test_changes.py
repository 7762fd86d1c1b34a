"""Other layouts after a stop, signals, two runs at once, torchrun's restarts."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.resume.harness import (
    BEST,
    COMMON,
    DROPOUT,
    LAYOUTS,
    Case,
    Output,
    add_predicting,
    checkpoints,
    newest,
    signalled,
    tells,
    whole,
)

pytestmark = pytest.mark.slow
AT_STEP_6 = {"rank": 0, "label": "step 6", "count": 1, "how": "kill"}


def documents(output: Output) -> dict[int, Counter]:
    """step -> the documents that all ranks together saw"""
    found: dict[int, Counter] = {}
    for run in output.runs:
        for step in run.steps[0]:
            found[step] = Counter(doc for rows in run.steps.values() for doc in rows[step]["documents"])
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("TP2", "PP2"),
        ("PP2 by letters", ""),
        pytest.param("PP2 by letters", "PP2", marks=pytest.mark.long),
        pytest.param("DP2", "", marks=pytest.mark.long),
        pytest.param("EP2", "", marks=pytest.mark.long),
        pytest.param("PP2", "DP2", marks=pytest.mark.long),
    ],
)
def test_another_layout_goes_on_with_the_optimizer_and_the_data(before, after, place):
    model = "qwen3_moe" if before == "EP2" else "qwen3"
    case = Case(place, f"{before} {after}", LAYOUTS[before], model, steps=8)
    other = Case(place, after, LAYOUTS.get(after, ""), model, processes=2 if after else 1, steps=8)
    output = Output(case)
    _ = case.reference
    output.run(AT_STEP_6)
    output.strict = False
    output.run(case=other)
    assert documents(output) == documents(case.reference)
    found, expected = ({row["step"]: row for row in each.rows} for each in (output, case.reference))
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step] == pytest.approx(row, rel=1e-5), step
    output.compare()


@pytest.mark.parametrize("after", ["PP2", pytest.param("", marks=pytest.mark.long)])
def test_both_copies_of_an_embedding_go_on(after, place):
    """The last stage's, for multi-token prediction, is not saved: it is read from the first stage's."""
    model, prediction = add_predicting(place), "--mtp_num_layers 1"
    before = Case(place, f"predicting {after}", f"{LAYOUTS['PP2']} {prediction}", model, steps=8)
    case = before if after else Case(place, "predicting", prediction, model, processes=None, steps=8)
    output = Output(before)
    output.run(AT_STEP_6)
    output.strict = bool(after)
    output.run(case=case)
    found, expected = ({row["step"]: row for row in each.rows} for each in (output, before.reference))
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert row["mtp_loss"] > 0
        assert found[step] == (row if after else pytest.approx(row, rel=1e-5)), step
    output.compare()


@pytest.fixture(scope="module")
def seldom(place):
    """Whose steps are saved at the end alone."""
    return Case(place, "seldom", f"{LAYOUTS['DP2']} {DROPOUT} --save_steps 100")


@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGTERM, [0, 1]), pytest.param(signal.SIGUSR1, [1], marks=pytest.mark.long)]
)
def test_a_signal_saves_and_ends_with_75(number, ranks, seldom):
    output = Output(seldom)
    ended = output.run(harm=signalled(number, 4, ranks), tell={"pause": 0.3}, code=75)
    tells(ended.said, number.name)
    last = max(ended.steps[0])
    assert 5 <= last < 10
    assert newest(output.folder) == last
    output.run()
    assert output.rows == seldom.reference.rows


def test_the_time_that_a_run_may_take(place):
    case = Case(place, "time", "--save_steps 100", processes=None)
    output = Output(case)
    ended = output.run(flags="--exit_duration_in_mins 0.02", tell={"pause": 0.4}, code=75)
    assert newest(output.folder) == max(ended.steps[0]) < 12
    output.run()
    assert output.rows == case.reference.rows


@pytest.mark.long
def test_the_best_checkpoint_stays(place):
    flags = f"{BEST} --metric_for_best_model loss --greater_is_better true --save_total_limit 1"  # the first is best
    output = Output(Case(place, "best", flags, processes=None), flags="--resume_from_checkpoint auto")
    output.run(AT_STEP_6)
    output.run()
    scores = {row["step"]: row["eval_loss"] for row in output.rows if "eval_loss" in row}
    best = max(scores, key=lambda step: scores[step])
    assert best < 8, scores
    assert {path.name for path in checkpoints(output.folder)} == {f"checkpoint-{best}", "checkpoint-12"}
    assert os.readlink(output.run_folder / "best") == f"checkpoint-{best}"


@pytest.mark.parametrize("began", [pytest.param(False, marks=pytest.mark.long), True])
def test_two_runs_at_once_do_not_harm_each_other(began, place):
    case = Case(place, f"twice {began}", DROPOUT, processes=None)
    _ = case.reference
    output = Output(case)
    if began:
        output.run(AT_STEP_6)
    pair = Case(place, "pair", DROPOUT, processes=2)
    running, _ = output.start(None, pair, "", {"apart": True, "pause": 0.1})
    done = running.wait()
    tells(done.stdout + done.stderr, *(["another run"] if done.returncode else []))
    whole(output.folder, "after both: ")
    output.run(base=12 if newest(output.folder) == 12 else None)
    output.compare()


@pytest.mark.long
def test_without_resuming_each_of_two_runs_has_a_folder(place):
    case = Case(place, "two", DROPOUT, processes=None)
    output = Output(case, flags="--save_total_limit 2")
    running, _ = output.start(None, Case(place, "pair", DROPOUT), "", {"apart": True})
    done = running.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    folders = list(output.folder.iterdir())
    assert [newest(folder) for folder in folders] == [12, 12]
    whole(output.folder, "after both: ")


@pytest.mark.nosample
@pytest.mark.long
def test_torchrun_resumes_by_itself(place):
    case = Case(place, "torchrun", f"{LAYOUTS['DP2']} {DROPOUT}", steps=40)
    output = Output(case)
    command = [Path(sys.executable).parent / "megatron", *case.command.split(), "--model", case.model, *COMMON.split()]
    command += f"{case.flags} {output.flags} --train_iters 40 --output_dir {output.folder}".split()
    environment = os.environ | {"HF_HOME": str(place / "cache"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"NPROC_PER_NODE": "2", "MAX_RESTARTS": "1"}
    with (place / "torchrun.log").open("w") as log:
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
    while process.poll() is None and newest(output.folder) < 4:
        time.sleep(0.02)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.kill(children[-1], signal.SIGKILL)
    assert process.wait(200) == 0, (place / "torchrun.log").read_text()
    assert (place / "torchrun.log").read_text().count("step 1/40") == 1
    output.compare()
