"""A run's folder: its lock, what is found and kept in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megaswift.tasks.run import run_dir
from megaswift.templates.machine import process_scope


def test_two_runs_at_once_get_different_folders(tmp_path):
    code = "from megaswift.tasks.run.run_dir import new_run_dir; import sys; print(new_run_dir(sys.argv[1]))"
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(4)]
    made = [run.communicate()[0].decode().strip() for run in runs]
    assert len(set(made)) == 4
    assert sorted(made) == sorted(str(entry) for entry in tmp_path.iterdir())


def test_versions_count_on_from_the_highest(tmp_path):
    for name in ("v2-20250101-000000", "v10-20250101-000000", "v11-notes", "checkpoint-5"):
        (tmp_path / name).mkdir()
    assert run_dir.new_run_dir(tmp_path).name.startswith("v11-20")


def test_checkpoints_of_another_run_are_not_replaced(tmp_path):
    assert run_dir.new_run_dir(tmp_path / "out", add_version=False) == tmp_path / "out"
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6-merged"):
        (tmp_path / "out" / name).mkdir()
    said = r"^--add_version false: .*/out has checkpoint-2, checkpoint-4 of another .*--resume_from_checkpoint auto"
    with pytest.raises(ValueError, match=said):
        run_dir.new_run_dir(tmp_path / "out", add_version=False)
    assert run_dir.new_run_dir(tmp_path / "out", add_version=False, replace=True) == tmp_path / "out"
    assert run_dir.new_run_dir(tmp_path / "out").parent == tmp_path / "out"


def test_default_output_dir(tmp_path):
    (tmp_path / "Tiny").mkdir()
    assert run_dir.default_output_dir("Qwen/Qwen3-8B") == Path("megatron_output/Qwen3-8B")
    assert run_dir.default_output_dir(f"{tmp_path}/Tiny/") == Path("megatron_output/Tiny")


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"^The folder cannot be written: .*file/out: .*--output_dir"):
        run_dir.new_run_dir(tmp_path / "file" / "out")
    with pytest.raises(OSError, match=r"cannot be written.*--output_dir"):
        run_dir.new_run_dir("/proc/runs")


def test_rotation_keeps_the_newest_by_step(tmp_path):
    for age, step in enumerate((5, 10, 100, 20)):  # 20: of a new run into the same folder
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (age, age))
    assert run_dir.prune_checkpoints(tmp_path, None) == []
    assert [path.name for path in run_dir.prune_checkpoints(tmp_path, 2)] == ["checkpoint-5", "checkpoint-10"]
    run_dir.prune_checkpoints(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-20"]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, {10: "10", 25: "20 25", 30: "20 30", 40: "20 40"}), (2, {10: "5 10", 25: "15 20 25", 40: "20 30 40"})],
)
def test_checkpoints_at_an_interval_stay(tmp_path, limit, expected):
    """Those of each 20th step, and the newest of the others."""
    for step in (5, 10, 15, 20, 25, 30, 40):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (step, step))
        run_dir.prune_checkpoints(tmp_path, limit, retain_interval=20)
        if step in expected:
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {f"checkpoint-{kept}" for kept in expected[step].split()}


def test_merged_weights_go_with_their_checkpoint_and_an_exports_stay(tmp_path):
    for age, step in enumerate((1, 2, 3)):
        for ending, option in (("", "lr"), ("-merged", "to_mcore" if step == 2 else "lr")):
            folder = tmp_path / f"checkpoint-{step}{ending}"
            folder.mkdir()
            (folder / "args.json").write_text(json.dumps({"options": {option: {}}}))
        os.utime(tmp_path / f"checkpoint-{step}", (age, age))
    run_dir.prune_checkpoints(tmp_path, 1)
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"checkpoint-2-merged", "checkpoint-3", "checkpoint-3-merged"}


def test_what_is_deleted_is_gone_before_its_files_are(tmp_path, monkeypatch):
    """A process killed between two of them leaves nothing that looks whole."""
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3-merged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text("{}")
    monkeypatch.setattr(run_dir.shutil, "rmtree", lambda folder, **_: None)
    run_dir.lock_run_dir(tmp_path)
    run_dir.prune_checkpoints(tmp_path, 1)
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")] == ["checkpoint-2"]


def test_a_link_to_a_checkpoint_that_is_elsewhere_by_now_is_none(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "archived")
    assert run_dir.prune_checkpoints(tmp_path, 1) == []
    assert [path.name for path in run_dir.checkpoints(tmp_path)] == ["checkpoint-2"]


def test_what_a_live_run_is_writing_stays(tmp_path):
    """Also where its process is not seen: in another container."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    half = tmp_path / f".checkpoint-1.partial-{process_scope()}-{dead.pid}"
    half.mkdir()
    (tmp_path / ".lock").touch()
    holds = (
        "import fcntl, sys; lock = open(sys.argv[1], 'a'); fcntl.lockf(lock, 2); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, tmp_path / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        run_dir.clean_idle_run_dirs([tmp_path])
        assert half.exists()
        other.communicate()
    run_dir.clean_idle_run_dirs([tmp_path])
    assert not half.exists()


def test_a_lock_survives_a_look_through_a_link(tmp_path):
    """POSIX drops the locks of a process on a file when it closes any descriptor of it."""
    folder, linked = tmp_path / "real", tmp_path / "link"
    folder.mkdir()
    linked.symlink_to(folder)
    run_dir.lock_run_dir(folder)
    run_dir.clean_idle_run_dirs([linked])
    tries = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", tries, folder / ".lock"], capture_output=True, text=True)
    assert "BlockingIOError" in other.stderr
