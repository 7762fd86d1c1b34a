"""Attention whose keys are gathered in both passes: it gives one process's numbers, and saves a rank's own keys."""

import json
from pathlib import Path

import pytest

from tests.bridge.layers.gathered_worker import CASES
from tests.torchrun import torchrun


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_give_the_numbers_of_one(processes: int, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    done = torchrun("tests.bridge.layers.gathered_worker", file, processes=processes)
    assert file.exists(), done.stderr[-3000:]
    results = json.loads(file.read_text())
    for case in CASES:
        saved = results[case].pop("saved")
        assert max(results[case].values()) < 1e-6, (case, results[case])  # gradients are summed in fp32
        assert saved == 1
    assert results["fault"]["query"] < 1e-12
    assert min(results["fault"][name] for name in ("key", "value")) > 0.05
    # One forward, which a recomputed layer does not repeat; its gradients gather again, and are summed.
    assert results["exchanges"] == {"forward": 1, "both": 3}
