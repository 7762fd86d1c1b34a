"""Terminal output and its copy in the run folder, console.log."""

import io
import logging
import os
import pty
import re
import select
import subprocess
import sys
import termios
import types
import warnings
from pathlib import Path

import pytest
from megaswift.cli.main import main
from megaswift.tasks.run import resume
from megaswift.tasks.system import console


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, capsys):
    """Start to copy; the copying ends with the test."""
    for name in ("LOCAL_RANK", "GROUP_RANK", "NODE_RANK", console.EARLY_TEXT):
        monkeypatch.delenv(name, raising=False)

    def start(command: str = "megatron sft") -> None:
        console.start_copy(command)

    yield start
    console.stop_copy()


def log(folder: Path) -> list[str]:
    return (folder / "console.log").read_text(encoding="utf-8").splitlines()


def test_characters_that_the_terminal_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    console.prepare_streams()
    print("a ⟦b⟧", flush=True)
    assert raw.getvalue() == b"a ?b?\n"


def test_the_copy_has_what_came_before_the_folder_was_known(begin, tmp_path: Path, capsys) -> None:
    begin("megatron sft --hub_token ...")
    print("first ⟦sample⟧")
    print("note: \x1b[33mcoloured\x1b[0m", file=sys.stderr)
    console.record("torchrun ...")
    console.open_log(tmp_path)
    print("later")
    for step in range(3):
        sys.stderr.write(f"\rTrain {step}")
    sys.stderr.write("\r      \r")
    sys.stderr.write("error: at the end\n")
    print("no end of the line", end="")
    console.stop_copy()
    heading, *lines = log(tmp_path)
    assert heading.startswith("--- 20")
    assert lines == [
        "megatron sft --hub_token ...",
        "first ⟦sample⟧",
        "note: coloured",
        "torchrun ...",
        "later",
        "error: at the end",
        "no end of the line",
    ]
    assert capsys.readouterr().out == "first ⟦sample⟧\nlater\nno end of the line"  # torchrun's command is not shown
    print("not copied")
    assert "not copied" not in log(tmp_path)


def test_a_resumed_run_appends(begin, tmp_path: Path, capsys) -> None:
    for text in ("one", "two"):
        begin()
        console.open_log(tmp_path)
        print(text)
        console.stop_copy()
    lines = [line for line in log(tmp_path) if not line.startswith("---")]
    assert lines == ["megatron sft", "one", "megatron sft", "two"]


def test_the_launchers_output_is_handed_over(begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin()
    print("note: of the launcher")
    handed = console.handover_env()
    console.stop_copy()
    for rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        for name, value in handed.items():
            monkeypatch.setenv(name, value)
        begin()
        print(f"of rank {rank}")
        console.open_log(tmp_path)
        console.stop_copy()
    assert log(tmp_path)[0] == "of rank 1"
    assert log(tmp_path)[2:] == ["megatron sft", "note: of the launcher", "of rank 0"]


def test_the_launcher_finds_the_log_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, launch in enumerate(("aa", "bb", "cc")):
        folder = tmp_path / f"v{version}-20260101-000000"
        folder.mkdir()
        (folder / resume.LAUNCH).write_text(f"{launch}\n1")
    assert resume.launched_run_dir() is None
    monkeypatch.setenv(resume.STARTED, "bb")
    monkeypatch.setenv(resume.OUTPUT, str(tmp_path))
    folder = resume.launched_run_dir()
    assert folder == tmp_path / "v1-20260101-000000"
    (folder / "console.log").write_text("step 1\n")
    console.append(console.log_file(folder), "error: rank 1 was ended by SIGKILL")
    assert log(folder) == ["step 1", "error: rank 1 was ended by SIGKILL"]


def test_other_nodes_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "0")
    assert console.log_file(Path("run")).name == "console.log"
    monkeypatch.setenv("GROUP_RANK", "2")
    assert console.log_file(Path("run")).name == "console-node2.log"


def test_neither_a_full_disk_nor_a_closed_pipe_ends_the_run(begin, tmp_path: Path, monkeypatch) -> None:
    begin()
    console.open_log(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        print("the disk is full")

    def closed(*_: object) -> int:
        raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "stream", types.SimpleNamespace(write=closed, flush=closed))
        print("nobody reads this", flush=True)
    assert log(tmp_path)[-1] == "nobody reads this"


@pytest.mark.parametrize("unexpected", [True, False])
def test_what_ends_a_run_is_in_its_log(unexpected: bool, dense: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """A traceback, and an error for users."""

    def run(options, sources) -> None:
        console.open_log(tmp_path)
        raise KeyError("a fault") if unexpected else OSError(28, "No space left on device", "file")

    task = types.ModuleType("megaswift.tasks.supervised.sft")
    task.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megaswift.tasks.supervised.sft", task)
    monkeypatch.setattr("megaswift.cli.launch.start", lambda *_, **__: None)
    words = ["sft", "--model", str(dense), "--dataset", "d.jsonl", "--train_iters", "1", "--hub_token", "SECRET"]
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"query": "a", "response": "b"}\n')
    assert main("megatron", words) == 1
    lines = log(tmp_path)
    assert lines[1] == f"megatron sft --model {dense} --dataset d.jsonl --train_iters 1 --hub_token ..."
    assert "SECRET" not in "\n".join(lines)
    if unexpected:
        assert "Traceback (most recent call last):" in lines
        assert lines[-1] == "KeyError: 'a fault'"
    else:
        assert lines[-1] == "error: [Errno 28] No space left on device: 'file'"
    assert capsys.readouterr().err.splitlines()[-1] == lines[-1]


def test_labels_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert console.color_label("error: --lr x: bad", Screen()) == "\x1b[1;31merror:\x1b[0m --lr x: bad"
    assert console.color_label("note: a: b", Screen()) == "\x1b[33mnote:\x1b[0m a: b"
    assert console.color_label("note: a: b", io.StringIO()) == "note: a: b"
    assert console.color_label("step 1: fine", Screen()) == "step 1: fine"
    monkeypatch.setenv("TERM", "dumb")
    assert console.color_label("error: x", Screen()) == "error: x"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.color_label("error: x", Screen()) == "error: x"


@pytest.mark.parametrize("shown", [True, False])
def test_libraries_draw_bars_on_terminals_only(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "TQDM_DISABLE",
        "TQDM_NCOLS",
        "TQDM_NROWS",
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_DATASETS_DISABLE_PROGRESS_BARS",
    ):
        monkeypatch.setenv(name, "")  # to be restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "stderr", Screen() if shown else io.StringIO())
    console.prepare_streams()
    assert ("TQDM_DISABLE" in os.environ) is not shown
    assert ("HF_HUB_DISABLE_PROGRESS_BARS" in os.environ) is not shown
    assert ("HF_DATASETS_DISABLE_PROGRESS_BARS" in os.environ) is not shown
    assert os.environ.get("TQDM_NCOLS") == ("80" if shown else None)  # this one's width is not known


BAR = """
from megaswift.tasks.system import console
console.prepare_streams()
from tqdm import tqdm
for _ in tqdm(range(3), desc="Answer", disable=None):
    pass
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_no_blank_lines(terminal: bool) -> None:
    """On a terminal of no known width; in a pipe there are none."""
    leader, follower = pty.openpty() if terminal else os.pipe()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQDM_")}
    subprocess.run([sys.executable, "-c", BAR], stderr=follower, check=True, env=environment)
    os.write(follower, b"end")
    shown = os.read(leader, 10_000).decode()
    os.close(leader)
    os.close(follower)
    assert ("Answer: 100%" in shown) is terminal


SLOW = """
import time
from megaswift.tasks.system import console
console.UPDATE_INTERVAL = 0.02
with console.timed("Loading") as set_share:
    time.sleep(0.2)
    set_share(0.25)
    time.sleep(0.2)
"""


@pytest.mark.parametrize("width", [0, 30, 20])
def test_a_wait_is_one_line_that_is_updated(width: int) -> None:
    """On a terminal that is wide enough; its final state is that of a pipe."""
    leader, follower = pty.openpty() if width else os.pipe()
    if width:
        termios.tcsetwinsize(follower, (24, width))
    subprocess.run([sys.executable, "-c", SLOW], stderr=follower, check=True)
    shown = ""
    while "\n" not in shown and select.select([leader], [], [], 10)[0]:  # a busy machine's terminal is late
        shown += os.read(leader, 10_000).decode()
    os.close(leader)
    os.close(follower)
    assert ("Loading ... 0 s" in shown, "Loading ... 25%, 0 s" in shown) == (width == 30, width == 30)
    assert shown.count("\n") == 1
    assert re.fullmatch(r"Loading \.\.\. 0\.\d s", console.visible_text(shown.strip()))


def test_messages_of_libraries_are_in_the_log_alone(begin, tmp_path: Path, capsys) -> None:
    begin()
    console.open_log(tmp_path)
    for file in ("/venv/lib/site-packages/torch/a.py", "/home/me/plugin.py"):
        warnings.showwarning("is deprecated", FutureWarning, file, 7)
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []  # pytest's
    try:
        for name in ("library", "megaswift.templates"):
            logging.getLogger(name).warning("%s is damaged", "x")
    finally:
        root.handlers = handlers
    console.stop_copy()
    said = ["/home/me/plugin.py:7: FutureWarning: is deprecated", "x is damaged"]
    assert capsys.readouterr().err.splitlines() == said
    lines = log(tmp_path)[2:]
    assert lines == [
        "/venv/lib/site-packages/torch/a.py:7: FutureWarning: is deprecated",
        said[0],
        "warning of library: x is damaged",
        said[1],
    ]


def test_sizes_and_times_for_people(capsys) -> None:
    assert [console.file_size(size) for size in (1500, 12_500_000, 8_100_000_000)] == ["1.5 kB", "12.5 MB", "8.1 GB"]
    with console.timed("Loading 8.1 GB of weights"):
        pass
    assert capsys.readouterr().err == "Loading 8.1 GB of weights ... 0.0 s\n"
