"""Experts that a checkpoint holds stacked in one tensor, in real process groups."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("stacked")
    tiny.save(root / "plain", "qwen3_moe")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_stacked_experts_there_and_back(folder, processes):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run = subprocess.run(
        [*command, "-m", "tests.bridge.stacked_worker", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    results = json.loads((folder / f"stacked-{processes}.json").read_text())
    assert len(results) >= 6
    assert not {case: wrong for case, wrong in results.items() if wrong}
