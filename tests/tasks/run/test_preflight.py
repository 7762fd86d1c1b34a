"""The table before a run: what it warns of, and that it measures."""

from dataclasses import replace
from pathlib import Path

import pytest
from megaswift.tasks.run.preflight import Health, preflight, table, warnings

GOOD = Health("node-0", 700.0, 78.0, 40, 0, False, 900.0, 5000.0, 100.0, 400.0, 90.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"tflops": 500.0}, "rank 3 on node-1: 500 TFLOP/s, where the median is 700"),
        ({"ecc_errors": 2}, "rank 3 on node-1: 2 uncorrected memory errors of its GPU"),
        ({"slowed": True, "temperature": 90}, "rank 3 on node-1: the hardware slows its GPU down"),
        ({"temperature": 90}, "rank 3 on node-1: its GPU has 90 degrees"),
        ({"clock": 103.5}, "the clocks of the nodes are 3.5 s apart"),
        ({"disk_free": 3.0}, "node-1: 3 GiB are free in the output folder"),
        ({"within": 200.0}, "node-1: 200 GB/s between its GPUs, where another node has 400"),
    ],
)
def test_warnings(changes: dict, words: str) -> None:
    ranks = [GOOD, GOOD, replace(GOOD, host="node-1"), replace(GOOD, host="node-1", **changes)]
    found = warnings(ranks)
    assert len(found) == bool(words)
    assert all(line.startswith(words) for line in found)
    lines = table(ranks)
    assert [line.split()[0:2] for line in lines[1:]] == [["node-0", "0-1"], ["node-1", "2-3"]]


def test_measures(alone, tmp_path: Path) -> None:
    lines = preflight(tmp_path / "a" / "folder that is not there yet")
    head, row, *found = lines
    assert head.split()[0] == "node"
    assert row.split()[1] == "0"
    assert float(row.split()[2]) > 0.001
    assert all(line.startswith("warning: ") for line in found)
