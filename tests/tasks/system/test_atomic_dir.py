"""Run folders and checkpoints: never shared, never half there."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from megaswift.tasks.run import run_dir
from megaswift.tasks.system import atomic_dir
from megaswift.templates import machine


def test_checkpoint_is_absent_until_committed_and_then_whole(tmp_path):
    path = tmp_path / "checkpoint-7"
    temporary = atomic_dir.stage(path)
    (temporary / "optimizer").mkdir()
    (temporary / "model.safetensors").write_bytes(b"weights" * 1000)
    (temporary / "optimizer" / "0.bin").write_bytes(b"state")
    assert not path.exists()
    assert run_dir.checkpoints(tmp_path) == []
    atomic_dir.commit(temporary, path)
    assert run_dir.checkpoints(tmp_path) == [path]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-7"]
    sums = subprocess.run(
        ["sha256sum", "model.safetensors", "optimizer/0.bin"], cwd=path, capture_output=True, text=True
    )
    manifest = json.loads((path / "manifest.json").read_text())["files"]
    assert [f"{entry['sha256']}  {name}" for name, entry in manifest.items()] == sums.stdout.splitlines()
    assert manifest["model.safetensors"]["size"] == 7000


def test_damage_is_named(tmp_path):
    path = tmp_path / "checkpoint-7"
    temporary = atomic_dir.stage(path)
    for name in ("lost", "cut", "changed", "kept"):
        (temporary / name).write_bytes(b"0123456789")
    atomic_dir.commit(temporary, path)
    assert atomic_dir.verify_files(path, checksums=True) == []
    (path / "lost").unlink()
    os.truncate(path / "cut", 4)
    (path / "changed").write_bytes(b"012345678X")
    assert atomic_dir.verify_files(path) == ["cut has 4 bytes instead of 10", "lost is missing"]
    assert "changed has other bytes than were written" in atomic_dir.verify_files(path, checksums=True)


def test_commit_replaces_what_was_there(tmp_path):
    path = tmp_path / "checkpoint-1"
    for text in ("old", "new"):
        temporary = atomic_dir.stage(path)
        (temporary / text).write_text(text)
        atomic_dir.commit(temporary, path)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "new"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def replaced(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder whose replacement was killed at the last rename but one. Parameter: the file system exchanges names."""
    path = tmp_path / "checkpoint-1"
    program = f"""
import os, sys
from megaswift.tasks.system import atomic_dir
if not {request.param}:
    atomic_dir._exchange = lambda first, second: False
renames = []
def look(event, arguments):
    if event == "os.rename" and renames.append(arguments) is None and len(renames) == 3:
        os.kill(os.getpid(), 9)
sys.addaudithook(look)
for name in ("old", "new"):
    temporary = atomic_dir.stage(sys.argv[1])
    (temporary / name).write_text(name)
    atomic_dir.commit(temporary, sys.argv[1])
"""
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == -9
    return path


@pytest.mark.parametrize("replaced", [True], indirect=True)
def test_a_folder_that_is_replaced_is_never_absent(replaced):
    assert sorted(file.name for file in replaced.iterdir()) == ["manifest.json", "new"]
    atomic_dir.remove_leftovers(replaced.parent)
    assert list(replaced.parent.iterdir()) == [replaced]


@pytest.mark.parametrize("replaced", [False], indirect=True)
def test_a_folder_set_aside_comes_back(replaced):
    """A file system that cannot exchange names has a moment without the folder."""
    assert not replaced.exists()
    atomic_dir.remove_leftovers(replaced.parent)
    assert sorted(file.name for file in replaced.iterdir()) == ["manifest.json", "old"]
    assert list(replaced.parent.iterdir()) == [replaced]


@pytest.mark.parametrize("replaced", [False], indirect=True)
def test_half_a_folder_set_aside_does_not_come_back(replaced):
    (aside,) = (entry for entry in replaced.parent.iterdir() if atomic_dir.REPLACED in entry.name)
    (aside / "old").unlink()
    atomic_dir.remove_leftovers(replaced.parent)
    assert list(replaced.parent.iterdir()) == []


def test_a_container_of_the_same_host_name_is_another_machine(tmp_path, monkeypatch):
    temporary = atomic_dir.stage(tmp_path / "checkpoint-1")
    monkeypatch.setattr(machine.os, "readlink", lambda path: "pid:[1]")
    machine.process_scope.cache_clear()
    try:
        atomic_dir.remove_leftovers(tmp_path, "checkpoint-2")
        assert temporary.exists()
        assert machine.process_scope().rpartition("-")[0] == socket.gethostname()
    finally:
        monkeypatch.undo()
        machine.process_scope.cache_clear()


def test_leftovers_of_dead_runs_go_and_those_of_living_ones_stay(tmp_path):
    """A writer killed in the middle leaves a folder that the next one removes."""
    code = "from megaswift.tasks.system.atomic_dir import stage\nimport os, sys\n"
    code += "stage(sys.argv[1]); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "checkpoint-1")], check=False)
    (dead,) = tmp_path.iterdir()
    living = dead.with_name(f"{dead.name.rsplit('-', 1)[0]}-{os.getppid()}")
    living.mkdir()
    other_host = tmp_path / ".checkpoint-1.partial-another-host-1"
    other_host.mkdir()
    temporary = atomic_dir.stage(tmp_path / "checkpoint-2")
    assert sorted(tmp_path.iterdir()) == sorted([living, other_host, temporary])


def test_full_disk_names_what_is_needed_and_free(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"disk is full.*1048576\.00 GiB are needed, .* GiB are free.*--save_total_limit"):
        atomic_dir.stage(tmp_path / "checkpoint-1", needed_bytes=2**50)
    temporary = atomic_dir.stage(tmp_path / "checkpoint-1")
    (temporary / "weights").write_bytes(b"x")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"disk is full.*checkpoint-1.*Free some space") as caught:
        atomic_dir.commit(temporary, tmp_path / "checkpoint-1")
    assert caught.value.errno == errno.ENOSPC
    assert run_dir.checkpoints(tmp_path) == []
    shutil.rmtree(temporary)


def test_a_source_that_cannot_be_read_is_not_the_folders_fault(tmp_path):
    with pytest.raises(PermissionError, match="weights"), atomic_dir.os_error_hints(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "weights"))
    for name in ("out", "out/file", ".out.partial-host-1/file"):
        wanted = pytest.raises(atomic_dir.FolderError, match=r"cannot be written: .*out: Permission denied")
        with wanted, atomic_dir.os_error_hints(tmp_path / "out"):
            raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / name))


def test_folders_that_belong_together_are_there_together(tmp_path, monkeypatch):
    merged, path = tmp_path / "checkpoint-5-merged", tmp_path / "checkpoint-5"

    def fill():
        temporary = atomic_dir.stage(path)
        for each in (merged, path):
            (temporary / each.name).mkdir()
            (temporary / each.name / "weights").write_text(each.name)
        return temporary

    temporary = fill()
    with monkeypatch.context() as patch:

        def full(file, *arguments, **named):
            raise OSError(errno.ENOSPC, "No space left on device", str(file))

        real = Path.write_text
        patch.setattr(
            Path, "write_text", lambda file, *rest: (full if file.parent.name == path.name else real)(file, *rest)
        )
        with pytest.raises(OSError, match=r"^The disk is full: .*checkpoint-5: No space left.*--save_total_limit"):
            atomic_dir.commit_together(temporary, [merged, path])
    assert not merged.exists()  # its manifest was written, and the other's was not
    assert not path.exists()
    atomic_dir.commit_together(fill(), [merged, path])
    assert sorted(tmp_path.iterdir()) == [path, merged]
    for each in (merged, path):
        assert (each / "weights").read_text() == each.name
        assert atomic_dir.read_manifest(each).keys() == {"weights"}
        assert not atomic_dir.verify_files(each, checksums=True)


def test_an_error_is_explained_once(tmp_path):
    wanted = pytest.raises(OSError, match=r"^The disk is full: .*inner: No space left on device\. [^:]*$")
    with wanted, atomic_dir.os_error_hints(tmp_path / "outer"), atomic_dir.os_error_hints(tmp_path / "inner"):
        raise OSError(errno.ENOSPC, "No space left on device")
