"""Signals and the end of the time: every rank learns of them at the same step."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from megaswift.tasks.distributed import signals as stopping
from megaswift.tasks.distributed.signals import Stop

from tests.prepared import ROOT

WORKER = "tests.tasks.distributed.signals_worker"


@pytest.mark.slow
def test_all_ranks_learn_of_it_at_one_step(tmp_path) -> None:
    subprocess.run(
        [sys.executable, "-m", WORKER, str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=300,
    )
    for world in (1, 3):
        results = [json.loads((tmp_path / str(world) / f"rank-{rank}.json").read_text()) for rank in range(world)]
        later = int(world > 1)  # the exchange of a step is at its start
        for rank, result in enumerate(results):
            minutes = 60 if rank else 1e-9
            assert result["scenarios"] == {
                "usr1": [3 + later, "SIGUSR1"],
                "term": [5 + later, "SIGTERM"],
                "nothing": [8, None],
                "restored": True,
                "time": [1, f"--exit_duration_in_mins {minutes:g} is over"],
                "not yet": [3, None],
                "all at once": "SIGTERM",
            }
            assert result["any moment"] == results[0]["any moment"]
            assert {reason for _, reason in result["any moment"]} == {"SIGTERM"}
            assert result["cost"] < 0.05  # a hundredth of it where the machine is idle


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)


def test_a_sigterm_that_comes_again_ends_the_process(alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "REPEAT_SECONDS", 0.1)
    pid = os.fork()
    if not pid:
        Stop(None)
        for _ in range(3):  # at once: the same signal
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGUSR1)  # another signal
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
