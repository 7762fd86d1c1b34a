"""Early ends of a run's process: Ctrl-C, and plugins that end it. The run is a stand-in without torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = """
import sys, time
from pathlib import Path
from megaswift.tasks.run.interrupt import Progress, before_exit, interruptible, report

folder = Path(sys.argv[1])
with interruptible():
    if "slow" in sys.argv:
        before_exit(lambda: time.sleep(60))
    before_exit((folder / "freed").touch)
    if "began" in sys.argv:
        report(Progress(folder, 101, 3000))
    print("ready", flush=True)
    time.sleep(60)
"""


def interrupted(folder: Path, *words: str, numbers: tuple[int, ...] = (signal.SIGINT,), **environment: str):
    """Exit code, what was printed as an error, and seconds from the last signal to the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, folder, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    for number in numbers:
        process.send_signal(number)
        since = time.monotonic()
        time.sleep(0.8 * (len(numbers) > 1))
    _, errors = process.communicate(timeout=50)
    return process.returncode, errors, time.monotonic() - since


def test_ctrl_c_says_how_to_continue(tmp_path: Path) -> None:
    for step in (50, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    code, errors, _ = interrupted(tmp_path, "began")
    assert code == 130
    assert errors == (
        f"Interrupted at step 101 of 3000. Last checkpoint: {tmp_path}/checkpoint-100. "
        "Add --resume_from_checkpoint auto to continue.\n"
    )
    assert (tmp_path / "freed").exists()


def test_ctrl_c_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    assert interrupted(tmp_path)[:2] == (130, "Interrupted before the first step.\n")
    said = "Interrupted at step 101 of 3000. No checkpoint has been saved.\n"
    assert interrupted(tmp_path, "began")[:2] == (130, said)
    assert interrupted(tmp_path, "began", RANK="1")[:2] == (130, "")  # once for all ranks


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """Though servers do not answer."""
    code, errors, seconds = interrupted(tmp_path, "slow", numbers=(signal.SIGINT, signal.SIGINT))
    assert (code, errors.count("Interrupted")) == (130, 1)
    assert seconds < 5


def test_another_process_has_failed(tmp_path: Path) -> None:
    """It is said there; here servers are freed."""
    assert interrupted(tmp_path, "began", numbers=(signal.SIGUSR2,))[:2] == (1, "")
    assert (tmp_path / "freed").exists()


GUARDED = """
import os, sys
from megaswift.tasks.system.exit_guard import guarded_exit

def plugin():
    if sys.argv[1] == "child":
        if os.fork() == 0:
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        return
    if sys.argv[1] == "exit":
        sys.exit(0)
    os._exit(int(sys.argv[1]))

with guarded_exit():
    plugin()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("what", "code", "printed", "said"),
    [
        ("0", 1, "", "error: run.py, line 13 called os._exit(0) before the end of the run. Remove that call, or raise"),
        ("70", 70, "", ""),
        ("exit", 1, "", "RuntimeError: run.py, line 12 called sys.exit(0) before the end of the run."),
        ("child", 0, "0\n", ""),
    ],
)
def test_plugins_that_end_the_process(what: str, code: int, printed: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text(GUARDED)
    done = subprocess.run([sys.executable, "-u", file, what], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, printed)
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)
