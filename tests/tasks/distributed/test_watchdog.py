"""Runs that hang are ended, and the message says where."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from megaswift.tasks.distributed.watchdog import Status, describe

from tests.prepared import ROOT

SINCE = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"

WORKER = "tests.tasks.distributed.watchdog_worker"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    folder = tmp_path_factory.mktemp("watchdog")
    subprocess.run([sys.executable, "-m", WORKER, folder], cwd=ROOT, check=True, timeout=300)
    return folder, json.loads((folder / "codes.json").read_text())


def said(folder: Path) -> list[str]:
    """The messages, of all ranks."""
    lines = [line for file in sorted(folder.glob("err-*")) for line in file.read_text().splitlines()]
    return [line for line in lines if line.startswith("error: ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "where"),
    [
        ("data", "rank 1 blocks the others in 'data of step 7' SINCE; ranks 0, 2 are in 'step 7' SINCE"),
        ("stopped", "rank 2 does not answer (last seen in 'step 7'); ranks 0-1 are in 'step 7' SINCE"),
        ("saving", "rank 2 does not answer (last seen in 'saving'); ranks 0-1 are in 'saving' SINCE"),
        ("loop", "ranks 0-2 are in 'step 7' SINCE"),
        ("told", "rank 1 is in 'saving' SINCE; ranks 0, 2 are in no watched phase SINCE"),
        ("disk", "ranks 0-1 are in 'step 7' SINCE"),
        ("one", "rank 0 is in 'step 7' SINCE"),
    ],
)
def test_the_message_says_where_it_hangs(job: str, where: str, jobs) -> None:
    folder, codes = jobs
    (message,) = said(folder / job)  # once, not by each rank
    message = re.sub(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "SINCE", message)
    assert message == f"error: no progress for 2 s (--ddp_timeout): {where}. Stacks: {folder / job}/hang/"
    assert 70 in codes[job]  # while all others end, a collective of the last may fail
    assert [code for code in codes[job] if code not in (70, 1)] == ([-9] if job in ("stopped", "saving") else [])


@pytest.mark.slow
def test_every_rank_that_can_writes_its_stacks(jobs) -> None:
    folder, _ = jobs
    stacks = {
        job: {file.name: file.read_text() for file in (folder / job / "hang").glob("*.txt")}
        for job in ("data", "stopped", "loop", "host", "told", "one")
    }
    assert {job: sorted(files) for job, files in stacks.items()} == {
        "data": ["rank-0.txt", "rank-1.txt", "rank-2.txt"],
        "stopped": ["rank-0.txt", "rank-1.txt"],
        "loop": ["rank-0.txt", "rank-1.txt", "rank-2.txt"],
        "host": ["rank-1.txt", "rank-2.txt"],
        "told": ["rank-0.txt", "rank-1.txt", "rank-2.txt"],
        "one": ["rank-0.txt"],
    }
    assert "in sleep\n" in stacks["data"]["rank-1.txt"]
    assert "in all_reduce\n" in stacks["data"]["rank-0.txt"]
    assert "in loop\n" in stacks["loop"]["rank-1.txt"]
    for rank in (0, 1):  # where the disk does not take them
        assert "watchdog_worker.py" in (folder / "disk" / f"err-{rank}").read_text()


@pytest.mark.slow
def test_the_last_collectives_are_there(jobs) -> None:
    """Rank 0 waits in one for a rank that never comes to it."""
    folder, _ = jobs
    last = json.loads((folder / "data" / "hang" / "rank-0-collectives.json").read_text())["entries"][-1]
    assert (last["profiling_name"], last["state"]) == ("gloo:all_reduce", "scheduled")


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_said(jobs) -> None:
    """Rank 0, which has it, is stopped: the others end on their own account."""
    folder, codes = jobs
    assert codes["host"][0] == -9
    assert 70 in codes["host"]
    for rank, message in zip((1, 2), said(folder / "host"), strict=True):
        assert re.search(
            rf"rank {rank} is in 'step 7' {SINCE}; the store of all ranks at 127.0.0.1:\d+ does not answer: rank 0",
            message,
        )


@pytest.mark.slow
@pytest.mark.parametrize("job", ["slow", "saved", "suspended"])
def test_a_run_that_does_not_hang_goes_on(job: str, jobs) -> None:
    folder, codes = jobs
    assert set(codes[job]) == {0}, (folder / job / "err-0").read_text()
    assert not said(folder / job)
    assert not (folder / job / "hang").exists()


def test_ranks_that_hold_others_up_come_first() -> None:
    statuses = {rank: Status("step 7", 14, 1e9) for rank in range(8)}
    statuses |= {rank: Status("data of step 7", 13, 1e9 - 3600) for rank in (2, 3, 6)}
    text = describe(statuses, silent=[])
    assert re.fullmatch(
        f"ranks 2-3, 6 block the others in 'data of step 7' {SINCE}; ranks 0-1, 4-5, 7 are in 'step 7' {SINCE}", text
    )
    text = describe({rank: statuses[rank] for rank in range(7)}, silent=[6, 7])
    assert text.startswith("ranks 6-7 do not answer (last seen in 'data of step 7'); ranks 2-3 are in 'data of step 7'")
