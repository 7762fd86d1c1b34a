"""How runs end that do not reach their last step: never as a success, with one line that says where and what to do."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import prepared
from tests.tasks.rl.runs import Place
from tests.tasks.rollout.served import serving

pytestmark = pytest.mark.slow

PLUGIN = """
import os
from megaswift.tasks.rewards import reward


@reward("leaves")
def leaves(completion_ids, **columns):
    os._exit(0)


@reward("stops")
def stops(completion_ids, **columns):
    raise SystemExit(0)
"""
FAILS = """
import sys
from megaswift.cli import main
from megaswift.tasks.train import setup


def build_optimizer(*_):
    raise ValueError("--lr 1: a fault before the first step")


setup.build_optimizer = build_optimizer
sys.exit(main.main("megatron", sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def plugin(place: Place) -> str:
    (place.folder / "leaving.py").write_text(PLUGIN)
    return "--external_plugins leaving.py --reward_funcs"


def test_a_plugin_that_ends_its_process_as_it_is_imported(place: Place) -> None:
    (place.folder / "imported.py").write_text("import sys\n\nsys.exit(0)\n")
    printed = place.megatron(place.line("--external_plugins imported.py --reward_funcs waves", "never"), code=2)
    assert "error: --external_plugins imported.py: importing it raises SystemExit: 0 (imported.py, line 3)" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("processes", [None, 2])
def test_a_reward_that_ends_the_process(processes: int | None, place: Place, plugin: str) -> None:
    printed = place.megatron(place.line(f"{plugin} leaves", f"leaves-{processes}"), processes, code=1)
    said = "error: leaving.py, line 8 called os._exit(0) before the end of the run. Remove that call, or raise an exc"
    assert printed.count(said) == 1
    assert "Traceback" not in printed


def test_a_reward_that_calls_sys_exit(place: Place, plugin: str) -> None:
    printed = place.megatron(place.line(f"{plugin} stops", "stops"), code=1)
    assert "error: --reward_funcs stops raised SystemExit: 0 (leaving.py, line 13)" in printed


def started(place: Place, flags: str, output: str, ready: Callable[[Path], bool]) -> prepared.Running:
    """A long run, once `ready(its folder)`."""
    words = ["-m", "megaswift.cli.main", "megatron", "rlhf", "--rlhf_type", "grpo"]
    words += place.line(f"--train_iters 3000 --save_steps 2 --save_total_limit 2 {flags}", output).split()
    environment = os.environ | {"HF_HOME": str(place.folder / "cache"), "COLUMNS": "200"}
    running = prepared.Running(words, processes=None, cwd=place.folder, environment=environment)
    end = time.monotonic() + 200
    while not ready(place.folder / output):
        assert time.monotonic() < end
        time.sleep(0.05)
    return running


def has_saved(folder: Path) -> bool:
    return (folder / "checkpoint-4").is_dir()


def test_ctrl_c_says_how_to_continue(place: Place) -> None:
    running = started(place, "", "interrupted", has_saved)
    os.kill(running.pids[0], signal.SIGINT)
    done = running.wait(300)
    assert done.returncode == 130
    folder = place.folder / "interrupted"
    step = max(json.loads(line)["step"] for line in (folder / "logging.jsonl").read_text().splitlines())
    newest = max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)
    (line,) = [line for line in done.stderr.splitlines() if "Interrupted" in line]
    said = [
        f"Interrupted at step {at} of 3000. Last checkpoint: {folder.resolve()}/checkpoint-{newest}. "
        "Add --resume_from_checkpoint auto to continue."
        for at in (step, step + 1)
    ]
    assert line in said
    assert "Traceback" not in done.stderr


def test_a_closed_terminal_saves(place: Place) -> None:
    running = started(place, "", "closed", has_saved)
    os.kill(running.pids[0], signal.SIGHUP)
    done = running.wait(300)
    assert done.returncode == 75
    assert "SIGHUP" in done.stdout


def test_a_server_is_released(place: Place, monkeypatch) -> None:
    """Though it cannot see the run's process, as on another host: the next run need not wait out the silence."""
    monkeypatch.setattr("megaswift.tasks.rollout.server.is_local", lambda *_: False)
    with serving() as (url, _, server):
        flags = f"--use_vllm true --vllm_mode server --vllm_server_base_url {url}"
        printed = place.megatron(place.line(flags, "failed"), code=1, script=FAILS)
        assert "--lr 1: a fault before the first step" in printed
        assert server.owner.last_request > 0  # it had been claimed
        assert server.owner.run is None
