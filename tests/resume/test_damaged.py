"""Files of a checkpoint that are torn after it was written, a full disk, a folder that is read-only."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.resume.harness import DROPOUT, Case, Output, checkpoints, newest, tells

pytestmark = pytest.mark.slow
FEW = {
    ("model.safetensors", "flipped"),
    ("training_state/rank-00000.safetensors", "truncated"),
    ("training_state/state.json", "deleted"),
    ("manifest.json", "flipped"),
    ("manifest.json", "emptied"),
}
FEWER = {("model.safetensors", "flipped"), ("training_state/state.json", "deleted"), ("manifest.json", "emptied")}


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def deleted(file: Path) -> None:
    file.unlink()


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def case(place):
    case = Case(place, "alone", DROPOUT, processes=None, steps=6)
    _ = case.reference
    return case


def check_torn(case: Case, name: str, tear) -> None:
    """The checkpoint of the last step is torn: the run goes on from the one before, and ends as the reference did."""
    output = Output(case)
    shutil.copytree(case.reference.folder, output.folder, symlinks=True)
    torn = output.run_folder / "checkpoint-6"
    tear(torn / name)
    running, _ = output.start(None, case, f"--resume_from_checkpoint {torn}", {})
    refused, name = running.wait(), "is missing" if (name, tear) == ("manifest.json", flipped) else name
    assert refused.returncode not in (0, 75)
    tells(refused.stdout + refused.stderr, name)
    tells(output.run(base=4).said, name, "checkpoint-6")
    output.compare()
    output.remove()


@pytest.mark.parametrize(
    ("name", "tear"), [pytest.param(*case, marks=() if case in FEWER else pytest.mark.long) for case in sorted(FEW)]
)
def test_a_torn_file_is_named_and_the_checkpoint_before_is_used(name, tear, case):
    check_torn(case, name, globals()[tear])


@pytest.mark.nosample
@pytest.mark.long
@pytest.mark.parametrize("tear", [truncated, emptied, deleted, flipped])
def test_every_file(tear, case):
    folder = case.reference.run_folder / "checkpoint-6"
    for file in sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()):
        check_torn(case, file, tear)


def test_a_disk_that_is_full_leaves_the_last_whole_checkpoint(case):
    operations = [at for at in case.operations if at["how"] == "kill" and at["label"].startswith("write")]
    files = [at for at in operations if "model.safetensors" in at["label"] or "part-" in at["label"]]
    for at in (files[1], next(at for at in operations if "manifest" in at["label"])):
        output = Output(case)
        output.run({"rank": 0, "label": "step 4", "count": 1, "how": "kill"})
        ended = output.run(at | {"how": "full"}, code=1, base=2)
        tells(ended.said, "disk is full")
        assert newest(output.folder) == 2
        output.run()
        output.compare()


@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint(place):
    """With --async_save training has gone on by then: the next one is tried."""
    case = Case(place, "async", "--async_save true", processes=None, steps=6)
    at = next(at for at in case.operations if at["label"].startswith("write") and "state.json" in at["label"])
    output = Output(case)
    ended = output.run(at | {"how": "once"}, code=0)
    tells(ended.said, "disk is full", "Training goes on, and this checkpoint is tried instead")
    assert [path.name for path in checkpoints(output.folder)] == ["checkpoint-4", "checkpoint-6"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


@pytest.mark.long
def test_a_small_disk_and_one_that_cannot_be_written(case, small_disk):
    output = Output(case)
    output.folder = small_disk / "out"
    size = sum(file.stat().st_size for file in (case.reference.run_folder / "checkpoint-2").rglob("*"))
    remount(small_disk, f"size={int(2.5 * size)}")
    ended = output.run(code=1)
    tells(ended.said, "disk is full")
    assert newest(output.folder) == 4
    remount(small_disk, "ro")
    ended = output.run(code=2)
    tells(ended.said, "cannot be written")
    remount(small_disk, "rw,size=100m")
    output.run()
    output.compare()
