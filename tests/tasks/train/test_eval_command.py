"""`--eval_command`: what the command gets, what is read of it, and that nothing it does harms the run."""

import json
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megaswift.bridge.option_groups import compose
from megaswift.tasks.options import SftOptions
from megaswift.tasks.run.resume import update_run_dir
from megaswift.tasks.run.run_dir import EVAL_COMMAND, verify_checkpoint
from megaswift.tasks.train import eval_command
from megaswift.tasks.train.eval_command import EvalCommandCallback, read_metrics

from tests.tasks.run.test_resume import save


class Log:
    def __init__(self):
        self.rows, self.notes = [], []

    def evaluation(self, step, metrics):
        self.rows.append((step, metrics))

    def note(self, text):
        self.notes.append(text)


class Watchdog:
    ticks = 0

    def tick(self):
        self.ticks += 1

    tick_while_waiting = tick


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(eval_command.dist, "get_rank", lambda: 0)
    store = dist.HashStore()
    monkeypatch.setattr(eval_command, "_get_default_store", lambda: SimpleNamespace(clone=lambda: store))
    monkeypatch.setattr(eval_command, "POLL", 0.01)
    monkeypatch.setattr(eval_command, "GRACE", 5.0)


def callback(folder: Path, program: str, resumed=None, **flags) -> EvalCommandCallback:
    """Of `python -c program {checkpoint}`."""
    command = f"{sys.executable} -c {shlex.quote(program)} {{checkpoint}}"
    options = compose(SftOptions, model="m", eval_command=command, **flags)
    return EvalCommandCallback(SimpleNamespace(options=options, folder=folder, resumed=resumed), Watchdog(), Log())


SCORE = "import sys, json; print('words'); print(json.dumps({'acc': int(sys.argv[1].split('-')[-1]) % 50 / 100}))"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ('{"acc": 1}\nloading 3%\r 100%\n{"acc": 0.5, "n": 3, "name": "x", "ok": true, "eval_f1": 0.25}\nbye\n[1]\n7',
         {"eval_acc": 0.5, "eval_n": 3.0, "eval_f1": 0.25}),
        ("{}", {}),
        ("", None),
        ("{acc: 1}\n" + "[" * 100_000, None),
    ],
)  # fmt: skip
def test_the_last_object_counts(output, found):
    assert read_metrics(output) == found


def test_metrics_are_logged_and_choose_the_best_checkpoint(tmp_path):
    """Accuracies 0.1, 0.49, 0.0: the second stays where one is kept. No checkpoint goes that is still to be read."""
    run = callback(tmp_path, SCORE, metric_for_best_model="acc", save_total_limit=1)
    for number, step in enumerate((10, 49, 50), start=1):
        newest = save(tmp_path, step, saves=number)
        update_run_dir(run._run.options, newest, in_use=run.pending())
        run.add(newest)
    assert {path.name for path in run.pending()} == {"checkpoint-10", "checkpoint-49", "checkpoint-50"}
    run.finish()
    assert run._log.rows == [(10, {"eval_acc": 0.1}), (49, {"eval_acc": 0.49}), (50, {"eval_acc": 0.0})]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-49", "checkpoint-50"]
    assert (tmp_path / "best").resolve().name == "checkpoint-49"
    assert not verify_checkpoint(tmp_path / "checkpoint-49")
    assert run._watchdog.ticks
    assert (tmp_path / "eval_command" / "checkpoint-49.out").read_text().startswith("words\n")


def test_training_goes_on_and_the_command_knows_nothing_of_its_ranks(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "NPROC_PER_NODE"):
        monkeypatch.setenv(name, "1")
    program = (
        "import os, json, sys; "
        "assert os.environ['MEGASWIFT_CHECKPOINT'] == sys.argv[1]; assert sys.stdin.read() == ''; "
        "print(json.dumps({'ranks': sum('RANK' in name or 'TORCHELASTIC' in name or 'WORLD' in name "
        "for name in os.environ)}))"
    )
    folder = tmp_path / "a folder; with $spaces"  # is one argument
    run = callback(folder, program)
    run.add(save(folder, 3))
    began = time.perf_counter()
    run.post_step(None)
    assert time.perf_counter() - began < 0.5
    assert not run._log.rows
    run.finish()
    assert run._log.rows == [(3, {"eval_ranks": 0.0})]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no such model')", "ended with code 1"),
        ("import time; time.sleep(60)", "ended after 0.3 s (--eval_command_timeout)"),
        ("print('nothing')", "--metric_for_best_model eval_acc: it printed no numbers as a JSON object"),
        ("print('{\"f1\": 1}')", "--metric_for_best_model eval_acc: it printed eval_f1"),
    ],
)
def test_a_command_that_fails_is_a_warning(program, said, tmp_path):
    run = callback(
        tmp_path, program, metric_for_best_model="acc", eval_command_timeout=0.3 if "sleep" in program else 9
    )
    run.add(save(tmp_path, 5))
    run.add(save(tmp_path, 6))
    began = time.perf_counter()
    run.finish()
    assert time.perf_counter() - began < 8
    assert [said in note for note in run._log.notes[1:]] == [True, True]
    assert all("warning: --eval_command on checkpoint-" in note for note in run._log.notes[1:])
    assert (tmp_path / "checkpoint-6" / EVAL_COMMAND).exists() == program.startswith("print")


def test_a_program_that_is_gone_is_a_warning(tmp_path):
    run = callback(tmp_path, SCORE)
    run._command = "/no/such/program {checkpoint}"
    run.add(save(tmp_path, 5))
    run.finish()
    assert "not started: [Errno 2]" in run._log.notes[1]


def test_the_evaluations_own_metrics_stay(tmp_path):
    run = callback(tmp_path, 'print(\'{"loss": 9, "acc": 1}\')')
    run.add(save(tmp_path, 5, metrics={"eval_loss": 0.5}))
    run.finish()
    assert run._log.rows == [(5, {"eval_acc": 1.0})]
    assert "eval_loss is the evaluation's own metric" in run._log.notes[1]


def test_a_run_that_stops_ends_the_command_and_runs_it_again_when_resumed(tmp_path):
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])\n{SCORE}"
    stopped = callback(tmp_path, program)
    last = [save(tmp_path, step, saves=step) for step in (7, 8)][-1]
    (tmp_path / "checkpoint-7" / EVAL_COMMAND).write_text("{}")
    save(tmp_path, 9, saves=9)  # of steps that the resumed run repeats
    stopped.add(last)
    stopped.post_step(None)
    process = stopped._current._process
    began = time.perf_counter()
    stopped.stop()
    assert time.perf_counter() - began < 4
    assert process.returncode is not None
    resumed = callback(tmp_path, SCORE, resumed=SimpleNamespace(checkpoint=last, step=8))
    assert resumed.pending() == {last}
    resumed.finish()
    assert resumed._log.rows == [(8, {"eval_acc": 0.08})]
    assert callback(tmp_path, SCORE, resumed=SimpleNamespace(checkpoint=last, step=8)).pending() == set()


def test_without_the_flag_nothing_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(eval_command, "_get_default_store", None)
    options = compose(SftOptions, model="m")
    run = EvalCommandCallback(SimpleNamespace(options=options, folder=tmp_path, resumed=None), Watchdog(), Log())
    run.add(save(tmp_path, 5))
    run.post_step(None)
    run.finish()
    run.stop()
    assert not run._log.notes
    assert not (tmp_path / "eval_command").exists()


def test_what_is_kept_is_json(tmp_path):
    run = callback(tmp_path, "print('{\"acc\": NaN}')")
    run.add(save(tmp_path, 5))
    run.finish()
    assert json.loads((tmp_path / "checkpoint-5" / EVAL_COMMAND).read_text()) == {"eval_acc": None}
