"""The log: promised keys, right rates, and output that a person and a program can read."""

import errno
import io
import itertools
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from megaswift.tasks.observability import reporters
from megaswift.tasks.observability import run_logger as run_log
from megaswift.tasks.observability.run_logger import RunLog, duration, task_fields, train_line
from megaswift.tasks.observability.throughput import Meter, Waiting
from megaswift.tasks.options.groups import LoggingOptions
from megaswift.tasks.system import append_file

PROMISED = ["step", "max_steps", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second_per_gpu"]
PROMISED += ["tflops_per_gpu", "mfu", "memory_gib", "data_wait", "elapsed", "eta"]
METRICS = {"loss": 1.5, "grad_norm": 0.25, "learning_rate": 1e-4}


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""

    class Clock:
        now = 1000.0

        def pass_(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def rows(folder):
    return [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]


def test_rates_are_of_the_window_and_leave_out_the_first_step_and_pauses(clock):
    meter = Meter(world_size=2, chip_peak_flops=1e12)
    clock.pass_(60)
    meter.step(tokens=100, flops=1e12, data_wait=1.0)
    first = meter.window()
    assert first["tokens_per_second_per_gpu"] == pytest.approx(100 / 60 / 2)  # there is no other step yet
    for _ in range(4):
        clock.pass_(0.5)
        with meter.paused():
            clock.pass_(30)
        meter.step(tokens=100, flops=1e11, data_wait=0.25)
    assert meter.window() == pytest.approx(
        {
            "tokens_per_second_per_gpu": 400 / 2 / 2,
            "tflops_per_gpu": 4e11 / 2 / 2 / 1e12,
            "mfu": 0.1,
            "data_wait": 0.25,
            "seconds_per_step": 0.5,
        }
    )
    clock.pass_(1)
    meter.step(tokens=100, flops=1e11, data_wait=0)
    assert meter.window()["tokens_per_second_per_gpu"] == pytest.approx(50)
    assert meter.total()["tokens_per_second_per_gpu"] == pytest.approx(500 / 3 / 2)


@pytest.mark.parametrize("saved", [500, 503, 504])
def test_rates_of_a_run_that_goes_on_are_of_its_own_steps(clock, saved):
    """A step a second, of 100 tokens; a line comes every fifth step, with the tokens since the one before."""
    waiting = 100 * (saved % 5)
    meter = Meter(world_size=1, chip_peak_flops=1e12, tokens=50000, waiting=Waiting(waiting, waiting * 1e9))
    found = []
    for step in range(saved + 1, 516):
        clock.pass_(1)
        due, waiting = step % 5 == 0, waiting + 100
        meter.step(waiting * due, waiting * due * 1e9, 0.0, waiting=None if due else Waiting(waiting, waiting * 1e9))
        if due:
            waiting = 0
            found.append(meter.window())
    for rates in (*found, meter.total()):
        assert rates["tokens_per_second_per_gpu"] == pytest.approx(100)
        assert rates["mfu"] == pytest.approx(0.1)
    assert meter.tokens == 51500


def test_files_of_a_run(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    log = RunLog(tmp_path, LoggingOptions(logging_steps=2), 5, 1e12, 1, six_n=6e6)
    for step in range(1, 6):
        log.step(tokens=64, flops=1e9, data_wait=0.0)
        if log.due(step):
            log.train(step, METRICS | {"loss": 1.0 / step, "load_balancing_loss": 0.5})
    log.evaluation(5, {"eval_loss": 0.75})
    log.close({"last_checkpoint": "checkpoint-5"})
    written = rows(tmp_path)
    assert [row["step"] for row in written] == [1, 2, 4, 5, 5, 5]
    assert all(key in row for row in written[:4] for key in PROMISED)
    assert written[3]["tokens"] == 5 * 64
    assert written[3]["eta"] == 0
    assert (written[4]["eval_loss"], written[5]["last_checkpoint"]) == (0.75, "checkpoint-5")
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([1, 1 / 2, 1 / 4, 1 / 5])
    assert events.Scalars("eval/loss")[0].value == 0.75
    for name in ("loss", "grad_norm", "load_balancing_loss"):
        assert (tmp_path / "images" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    lines = out.getvalue().splitlines()
    assert lines[1].startswith("step 2/5  loss 0.5000  grad norm 0.250  lr 1.000e-04  load_balancing_loss 0.5  ")
    assert all(word in lines[1] for word in ("tokens/s/GPU", "TFLOP/s/GPU", "MFU", "GiB", "data wait", "left"))
    assert "by 6ND" in "\n".join(lines)


def test_unknown_chip_has_no_mfu_and_no_number_is_not_json(tmp_path, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    log = RunLog(tmp_path, LoggingOptions(report_to=["none"]), 1, None, 1)
    log.step(1, 1.0, 0.0)
    log.train(1, METRICS | {"loss": float("nan")})
    log.close({})
    assert (rows(tmp_path)[0]["loss"], rows(tmp_path)[0]["mfu"]) == (None, None)
    assert "tokens/s/GPU" in out.getvalue()
    assert not (tmp_path / "runs").exists()


ROW = METRICS | {
    "step": 7, "max_steps": 100, "tokens": 9000, "tokens_per_second_per_gpu": 1234.5, "tflops_per_gpu": 0.0002,
    "mfu": None, "memory_gib": 0.92, "data_wait": 0.01, "seconds_per_step": 1.0, "elapsed": 70.0, "eta": 930.0,
}  # fmt: skip
ON_CPU = "step 7/100  loss 1.5000  grad norm 0.250  lr 1.000e-04{}  1,234 tokens/s/GPU  0.92 GiB{}  left 15m 30s"


def test_a_line_on_a_cpu_is_short():
    assert train_line(ROW, on_gpu=False) == ON_CPU.format("", "")
    waits = ROW | {"data_wait": 0.06}  # more than a twentieth of the step
    assert train_line(waits, on_gpu=False) == ON_CPU.format("", "  data wait 0.060 s")


def test_a_line_on_a_gpu_has_what_is_promised():
    line = train_line(ROW | {"tflops_per_gpu": 412.0, "mfu": 0.416}, on_gpu=True)
    assert line.endswith("1,234 tokens/s/GPU  412 TFLOP/s/GPU  MFU 41.6%  0.92 GiB  data wait 0.010 s  left 15m 30s")
    assert "  412 TFLOP/s/GPU  0.92 GiB  " in train_line(ROW | {"tflops_per_gpu": 412.0}, on_gpu=True)


def test_a_line_of_grpo_is_not_wrapped():
    more = {"reward": 0.75, "reward_std": 0.4, "frac_reward_zero_std": 0.1, "rewards/accuracy/mean": 0.7, "kl": 0.0012,
            "completions/mean_length": 213.25, "completions/clipped_ratio": 0.1, "clip_ratio/low_mean": 0.0,
            "entropy": 2.0, "timing_s/gen": 12.0, "timing_s/update_weights": 1.0, "weight_sync/gb": 8.0,
            "sampling/sampling_logp_difference/mean": 1e-3, "memory/training_gib": 60.0}  # fmt: skip
    line = train_line(ROW | more, on_gpu=False)
    assert line == ON_CPU.format("  reward 0.75  kl 0.0012  length 213.2", "")


def test_a_line_of_dpo_names_margin_and_accuracy():
    more = {"rewards/chosen": 1.0, "rewards/rejected": 0.5, "rewards/margins": 0.5, "rewards/accuracies": 1.0}
    assert train_line(ROW | more | {"nll_loss": 2.0}, on_gpu=False) == ON_CPU.format(
        "  margin 0.5  accuracy 1  nll_loss 2", ""
    )
    assert task_fields({f"eval_{name}": value for name, value in more.items()}) == [
        "eval_margin 0.5",
        "eval_accuracy 1",
    ]


def test_a_checkpoint_that_is_saved_is_seen(tmp_path, monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for out, said in ((io.StringIO(), "Saved checkpoint-2"), (Screen(), "\x1b[32mSaved checkpoint-2\x1b[0m")):
        monkeypatch.setattr(sys, "stdout", out)
        log = RunLog(tmp_path, LoggingOptions(report_to=["none"]), 2, None, 1)
        folder = tmp_path / "checkpoint-2"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"0" * 1_200_000)
        log.saved(2, {"checkpoint": folder}, 0.84, being_written=False)
        assert out.getvalue() == f"{said} (1.2 MB, 0.8 s): {folder}\n"
    log.saved(2, {"checkpoint": folder}, 0.84, being_written=True)
    assert "Writing checkpoint-2 in the background (training waited 0.8 s)" in out.getvalue()


def test_a_picture_that_cannot_be_drawn_is_a_warning(tmp_path, monkeypatch):
    (tmp_path / "images").write_text("a file where the folder should be")
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    log = RunLog(tmp_path, LoggingOptions(report_to=["none"]), 1, None, 1)
    log.step(1, 1.0, 0.0)
    log.train(1, METRICS)
    log.close({"last_checkpoint": None})
    assert out.getvalue().count("warning: curves could not be drawn: FileExistsError") == 1
    assert rows(tmp_path)[-1]["last_checkpoint"] is None


def test_a_line_that_cannot_be_written_waits_for_room(tmp_path, monkeypatch):
    out, write, room = io.StringIO(), os.write, [None]
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(append_file.os, "write", lambda file, data: _write(write, room, file, data))
    log = RunLog(tmp_path, LoggingOptions(report_to=["none"]), 4, None, 1)
    for step, left in ((1, None), (2, 10), (3, 0), (4, None)):
        room[0] = left
        log.step(1, 1.0, 0.0)
        log.train(step, METRICS)
    log.close({})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 4]
    assert out.getvalue().count("logging.jsonl cannot be written (No space left on device). Training goes on") == 1


def _write(write, room, file, data):
    """Write as much as there is room for, as a disk that fills does."""
    if room[0] == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    done = write(file, data[: room[0]])
    room[0] = None if room[0] is None else room[0] - done
    return done


def test_lines_that_are_lost_are_counted(tmp_path):
    notes: list[str] = []
    file = append_file.AppendFile(Path("/dev/full"), notes.append)
    file.write("one\n")
    file.write("two\n")
    file.close()
    assert [note.split(" (")[0] for note in notes] == [
        "warning: /dev/full cannot be written", "warning: 8 bytes of /dev/full could not be written and are lost."
    ]  # fmt: skip


def test_a_reporter_that_fails_is_left_out(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    log = RunLog(tmp_path, LoggingOptions(), 2, None, 1)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    for step in (1, 2):
        log.step(1, 1.0, 0.0)
        log.train(step, METRICS)
    log.close({})
    assert out.getvalue().count("warning: TensorBoard failed") == 1
    assert len(rows(tmp_path)) == 3


def test_rows_of_curves_are_bounded():
    kept = run_log.ThinnedRows(most=100)
    for step in range(1, 10_001):
        kept.add({"step": step})
    steps = [row["step"] for row in kept.rows]
    assert 50 < len(steps) <= 100
    assert steps[0] == 1
    assert steps[-1] > 9_800
    assert len({later - step for step, later in itertools.pairwise(steps)}) == 1


def test_lines_above_a_progress_bar_stay_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = RunLog(tmp_path, LoggingOptions(report_to=["none"]), 2, None, 1)
    for step in (1, 2):
        log.step(1, 1.0, 0.0)
        log.train(step, METRICS)
    log.note("saved checkpoint-2")
    log.close({})
    captured = capsys.readouterr()
    assert captured.out.splitlines()[2] == "saved checkpoint-2"
    assert "2/2" in captured.err


def test_a_phase_is_shown_beside_the_progress_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = RunLog(tmp_path, LoggingOptions(report_to=["none"]), 2, None, 1)
    for phase in ("before step 1", "data of step 1", "step 1"):
        log.show_phase(phase)
    assert "step 1" not in capsys.readouterr().err
    log.show_phase("saving checkpoint-1")
    assert "saving checkpoint-1" in capsys.readouterr().err
    log.show_phase("step 1")
    log.close({})
    assert "checkpoint-1" not in capsys.readouterr().err


def test_other_processes_write_nothing(tmp_path, capsys):
    log = RunLog(None, LoggingOptions(), 1, None, 2)
    log.show_phase("saving checkpoint-1")
    log.step(1, 1.0, 0.0)
    log.train(1, METRICS)
    log.evaluation(1, {"eval_loss": 1.0})
    log.note("x")
    log.draw()
    log.close({})
    assert capsys.readouterr().out == ""


class FakeMlflow:
    """mlflow's functions that we call, with a server that keeps runs by their tags."""

    def __init__(self):
        self.runs, self.experiment, self.active = [], None, None

    def set_experiment(self, name):
        self.experiment = name

    def search_runs(self, *, filter_string, max_results, output_format):
        assert (max_results, output_format) == (1, "list")
        name, value = re.fullmatch("tags.`(.*)` = '(.*)'", filter_string).groups()
        return [run for run in self.runs if run.tags.get(name) == value]

    def start_run(self, run_id=None, run_name=None, tags=None):
        if run_id is None:
            info = SimpleNamespace(run_id=f"id-{len(self.runs)}", run_name=run_name)
            self.runs.append(SimpleNamespace(info=info, tags=tags, params=None, metrics=[]))
        self.active = next(run for run in reversed(self.runs) if run_id in (None, run.info.run_id))

    def log_params(self, params):
        assert self.active.params is None, "mlflow refuses a parameter that changes"
        self.active.params = params

    def log_metrics(self, metrics, step):
        assert "@" not in "".join(metrics), "mlflow refuses the name"
        self.active.metrics.append((step, metrics))

    def end_run(self):
        self.active = None


def report(folder, name, step=0):
    log = RunLog(folder, LoggingOptions(report_to=["none", name]), 2, None, 1, start=run_log.Start(step=step),
                 settings={"lr": 0.5, "dataset": "x" * 600})  # fmt: skip
    log.step(1, 1.0, 0.0)
    log.train(step + 1, METRICS | {"recall@5": 0.5})
    log.close({})


def test_mlflow_has_one_run_of_a_folder(tmp_path, monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setattr(run_log, "require_reporters", lambda _: None)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    for folder, step in (("a", 0), ("a", 1), ("b", 0)):
        (tmp_path / folder).mkdir(exist_ok=True)
        report(tmp_path / folder, "mlflow", step)
    assert fake.experiment == "megaswift"
    assert [run.info.run_name for run in fake.runs] == ["a", "b"]
    assert [step for step, _ in fake.runs[0].metrics] == [1, 2]
    assert fake.runs[0].metrics[1][1]["train/loss"] == METRICS["loss"]
    assert fake.runs[0].metrics[1][1]["train/recall_5"] == 0.5
    assert fake.runs[0].params["lr"] == "0.5"
    assert len(fake.runs[0].params["dataset"]) == 500
    assert fake.active is None
    fake.experiment = None
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    report(tmp_path / "b", "mlflow", 1)
    assert fake.experiment is None


def test_trackio_has_one_run_of_a_folder(tmp_path, monkeypatch):
    calls = []

    def called(function):
        return lambda *args, **options: calls.append((function, args, options))

    fake = SimpleNamespace(**{name: called(name) for name in ("init", "log", "finish")})
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(run_log, "require_reporters", lambda _: None)
    (tmp_path / "a").mkdir()
    for step in (0, 1):
        report(tmp_path / "a", "trackio", step)
    assert [name for name, *_ in calls] == ["init", "log", "finish"] * 2
    first, second = (options for name, _, options in calls if name == "init")
    assert first == second
    assert (first["project"], first["resume"], first["config"]["lr"]) == ("megaswift", "allow", 0.5)
    assert first["name"].startswith("a-")
    assert [(args[0]["train/loss"], options) for name, args, options in calls if name == "log"] == [
        (METRICS["loss"], {"step": 1}), (METRICS["loss"], {"step": 2})
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "trackio"])
def test_reporter_that_is_not_installed(tmp_path, monkeypatch, name):
    monkeypatch.setattr(reporters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"--report_to {name}: .*pip install {name}"):
        RunLog(None, LoggingOptions(report_to=[name]), 1, None, 1)


def test_duration():
    assert [duration(seconds) for seconds in (4.6, 65, 3725)] == ["5s", "1m 5s", "1h 2m 5s"]
