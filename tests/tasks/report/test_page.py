"""The page of a run, made from files: of runs that were killed, resumed or go on, and of hostile texts."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from megaswift.cli.flags import UsageError
from megaswift.cli.main import main, read_options
from megaswift.tasks.options import RmOptions
from megaswift.tasks.report import command
from megaswift.tasks.run.args_json import save_args
from megaswift.tasks.run.run_dir import lock_run_dir

from tests.tasks.report.pages import Page, completion_row, spiky, train_row, write_completions, write_log

SUMMARY = {"step": 3, "max_steps": 3, "last_checkpoint": "c", "tokens": 300, "elapsed": 5.0}


def page_of(*folders: Path) -> Page:
    assert main("megatron", ["report", *map(str, folders)]) == 0
    return Page(folders[0] / ("report.html" if len(folders) == 1 else "comparison.html"))


def run_of(folder: Path) -> dict:
    (run,) = page_of(folder).content["runs"]
    return run


def test_curves_have_the_values_of_the_log(tmp_path):
    rows = [*(train_row(step) for step in (1, 2, 3)), {"step": 2, "max_steps": 10, "eval_loss": 0.75, "elapsed": 2.5}]
    run = run_of(write_log(tmp_path, rows))
    assert run["curves"]["loss"] == {"steps": [1, 2, 3], "values": [1, 0.5, 0.333333]}
    assert run["curves"]["eval_loss"] == {"steps": [2], "values": [0.75]}
    assert run["curves"]["elapsed"]["values"] == [1, 2, 3]
    assert "mfu" not in run["curves"]  # null on a CPU
    assert run["max_steps"] == 10


def test_a_step_that_was_logged_again_has_the_later_values(tmp_path):
    """Killed after step 3, resumed from step 1: a log whose later rows were not removed."""
    again = [train_row(2, loss=8.0), train_row(3, loss=9.0)]
    run = run_of(write_log(tmp_path, [train_row(1, loss=1.0), train_row(2), train_row(3), *again]))
    assert run["curves"]["loss"] == {"steps": [1, 2, 3], "values": [1.0, 8.0, 9.0]}


def test_a_summary_before_other_rows_is_of_an_earlier_start(tmp_path):
    rows = [train_row(1), SUMMARY | {"stopped": "by a signal"}]
    assert run_of(write_log(tmp_path, rows))["state"] == "stopped: by a signal"
    assert run_of(write_log(tmp_path, [*rows, train_row(2)]))["state"] == "unfinished"
    assert run_of(write_log(tmp_path, [*rows, train_row(2), SUMMARY]))["state"] == "finished"


def test_a_killed_run_and_one_that_goes_on(tmp_path):
    folder = write_log(tmp_path, [train_row(1), train_row(2)], end='{"step": 3, "max_st')
    run = run_of(folder)
    assert (run["state"], run["unreadable_lines"], run["curves"]["loss"]["steps"]) == ("unfinished", 1, [1, 2])
    holds = "from megaswift.tasks.run.run_dir import lock_run_dir as lock; import sys, pathlib; "
    holds += "lock(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holds, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert run_of(folder)["state"] == "running"
        other.communicate()
    assert run_of(folder)["state"] == "unfinished"


def test_the_lock_of_the_run_that_writes_its_report_stays(tmp_path):
    """POSIX drops the locks of a process on a file when it closes any descriptor of it."""
    lock_run_dir(write_log(tmp_path, [train_row(1)]))
    assert run_of(tmp_path)["state"] == "running"
    tries = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", tries, tmp_path / ".lock"], capture_output=True, text=True)
    assert "BlockingIOError" in other.stderr


@pytest.mark.parametrize("text", ["", "\n", "nonsense\n", '[1]\n{"step": "one"}\n'])
def test_a_log_without_rows(tmp_path, text):
    (tmp_path / "logging.jsonl").write_text(text)
    run = run_of(tmp_path)
    assert run["curves"] == {}
    assert run["phases"]["steps"] == []


def test_values_that_are_not_finite_are_gaps(tmp_path):
    losses = [2.0, float("nan"), float("inf"), None, 1.0]
    rows = [train_row(step, loss=loss) for step, loss in enumerate(losses, start=1)]
    curve = run_of(write_log(tmp_path, rows))["curves"]["loss"]
    assert curve == {"steps": [1, 5], "values": [2.0, 1.0], "gaps": 3, "gap_steps": [2, 3, 4]}


def test_a_long_run_is_quick_and_keeps_its_spikes(tmp_path):
    rows = spiky(100_000)
    write_log(tmp_path, rows)
    start = time.process_time()
    assert len([json.loads(line) for line in (tmp_path / "logging.jsonl").read_text().splitlines()]) == 100_000
    parsed = time.process_time()
    page = page_of(tmp_path)
    assert time.process_time() - parsed < 10 * (parsed - start)  # 2.9 times on an idle machine
    curve = page.content["runs"][0]["curves"]["loss"]
    assert len(curve["steps"]) <= 2002
    points = dict(zip(curve["steps"], curve["values"], strict=True))
    assert points[100_000 // 3 + 1] == 77
    assert points[50_001] == -55
    assert curve["gap_steps"] == [20_001]
    assert {1, 100_000} <= points.keys()
    assert all(value == pytest.approx(rows[step - 1]["loss"], rel=1e-5) for step, value in points.items())
    assert (tmp_path / "report.html").stat().st_size < 2e6


def test_a_hostile_text_stays_a_text(tmp_path):
    hostile = "</script><script>alert(1)</script><!-- <script> \u2028 \ud800 &amp; \"quoted\" '{{styles}}' </title>"
    folder = write_log(tmp_path / "a<b>&" / "run", [train_row(1)])
    write_completions(folder, [completion_row(1, hostile, prompt=hostile)])
    clean = page_of(write_log(tmp_path / "clean", [train_row(1)]))
    page = page_of(folder)
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in clean.elements]
    (row,) = page.content["runs"][0]["completions"]["rows"]
    assert row["completion"] == row["prompt"] == hostile.replace("\ud800", "?")
    assert page.title == "a<b>&/run"


def test_a_page_needs_no_network_and_runs_only_its_own_programs(tmp_path):
    page = page_of(write_log(tmp_path, [train_row(1)]))
    assert not [name for _, attributes in page.elements for name in attributes if name in ("src", "href")]
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    programs = page.scripts[1:]  # after the content
    hashes = {base64.b64encode(hashlib.sha256(program.encode()).digest()).decode() for program in programs}
    assert set(re.findall(r"'sha256-(.*?)'", policy or "")) == hashes
    assert (policy or "").startswith("default-src 'none'")


def test_options_commands_and_data(tmp_path):
    write_log(tmp_path, [train_row(1)])
    options = RmOptions()
    save_args(tmp_path / "args.json", options, {"lr": "command line"}, layout="1 process", versions={"torch": "2"})
    (tmp_path / "console.log").write_text(
        "--- 2026-11-25 09:17:24 +0000\nmegatron sft --lr 1\nstep 1\n"
        "--- 2026-11-26 10:00:00 +0000\nmegatron sft --lr 1\n"
    )
    (tmp_path / "data.json").write_text(json.dumps({"train": {"sources": [], "samples": 3}, "text": "Training data:"}))
    run = run_of(tmp_path)
    assert run["args"]["options"] == {"lr": {"value": options.schedule.lr, "source": "command line"}}
    assert (run["args"]["layout"], run["args"]["versions"]) == ("1 process", {"torch": "2"})
    assert [start["time"] for start in run["starts"]] == ["2026-11-25 09:17:24 +0000", "2026-11-26 10:00:00 +0000"]
    assert {start["command"] for start in run["starts"]} == {"megatron sft --lr 1"}
    assert run["data"]["train"]["samples"] == 3


def test_checkpoints(tmp_path):
    write_log(tmp_path, [train_row(1)])
    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "training_state").mkdir(parents=True)
        state = {"metrics": {"eval_loss": step / 10}, "time": 1e9 + step, "saves": step}
        (folder / "training_state" / "state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(
        json.dumps({"files": {"a": {"size": 5, "sha256": ""}, "b": {"size": 7, "sha256": ""}}})
    )
    (tmp_path / "last").symlink_to("checkpoint-10")
    first, last = run_of(tmp_path)["checkpoints"]
    assert (first["step"], first["bytes"], first["metrics"], first["links"]) == (2, None, {"eval_loss": 0.2}, [])
    assert (last["step"], last["bytes"], last["time"], last["links"]) == (10, 12, 1e9 + 10, ["last"])


def test_a_comparison_has_the_metrics_of_both(tmp_path):
    first, second = write_log(tmp_path / "a", [train_row(1)]), write_log(tmp_path / "b", [train_row(1, kl=0.5)])
    content = page_of(first, second).content
    assert [run["name"].split("/")[-1] for run in content["runs"]] == ["a", "b"]
    assert [chart["lines"] for topic in content["topics"] for chart in topic["charts"] if "kl" in chart["lines"]] == [
        ["kl"]
    ]


def test_an_output_dir_stands_for_its_newest_run(tmp_path):
    for name in ("v2-20260101-000000", "v10-20260102-000000"):
        write_log(tmp_path / name, [train_row(1)])
    (tmp_path / "v11-20260103-000000").mkdir()  # a run that wrote nothing
    assert command.run_folder(str(tmp_path)).name == "v10-20260102-000000"
    assert main("megatron", ["report", str(tmp_path), "--report_path", str(tmp_path / "page.html")]) == 0
    assert Page(tmp_path / "page.html").content["runs"][0]["name"].endswith("v10-20260102-000000")


def test_refusals(tmp_path, capsys):
    assert main("megatron", ["report"]) == 2
    assert "error: --runs: missing" in capsys.readouterr().err
    assert main("megatron", ["report", *["x"] * 7]) == 2
    assert main("megatron", ["report", str(tmp_path / "none")]) == 1
    assert "no such folder" in capsys.readouterr().err
    assert main("megatron", ["report", str(tmp_path)]) == 1
    assert "has no logging.jsonl" in capsys.readouterr().err
    assert main("megatron", ["report", str(tmp_path), "--report_path", str(tmp_path / "no" / "page.html")]) == 2
    write_log(tmp_path, [train_row(1)])
    (tmp_path / "report.html").mkdir()
    assert main("megatron", ["report", str(tmp_path)]) == 1
    assert "report.html: cannot be written (Is a directory). Set another path." in capsys.readouterr().err
    with pytest.raises(UsageError):
        read_options("megatron", ["report", str(tmp_path), "--lr", "1"])


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path):
    write_log(tmp_path, [train_row(1)])
    (tmp_path / "report.html").mkdir()
    lines = []
    command.write_report(tmp_path, lines.append)
    (line,) = lines
    assert line.startswith("warning: report.html could not be written")
    assert [entry.name for entry in tmp_path.glob(".*")] == []


def test_a_wheel_has_every_part():
    """A checkout's own install finds all of them in any case."""
    root = Path(__file__).parents[3]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {file for pattern in patterns["megaswift.tasks.report"] for file in (root / "tasks/report").glob(pattern)}
    files = {file for file in (root / "tasks/report/assets").rglob("*") if file.is_file()}
    assert files
    assert files <= shipped


def test_the_command_imports_no_torch(tmp_path):
    write_log(tmp_path, [train_row(1)])
    program = (
        "import sys; from megaswift.cli.main import main; assert main('megatron', sys.argv[1:]) == 0;"
        "assert not {'torch', 'transformers', 'datasets', 'matplotlib', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, "report", str(tmp_path)], check=True)
