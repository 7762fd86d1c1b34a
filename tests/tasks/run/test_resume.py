"""Choice of the checkpoint to resume from, and its notes. tests/resume checks the resumed runs."""

import json
import os
import re
import subprocess
import sys

import pytest
from megaswift.bridge.option_groups import compose, flag_values
from megaswift.tasks.options import SftOptions
from megaswift.tasks.run import resume
from megaswift.tasks.run.run_dir import STATE, best, lock_run_dir, verify_checkpoint
from megaswift.tasks.system import atomic_dir


def save(folder, step, *, time=0.0, options=None, **state):
    """A committed checkpoint without weights."""
    path = folder / f"checkpoint-{step}"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = atomic_dir.stage(path)
    (temporary / STATE).mkdir()
    told = {"step": step, "time": time or float(step), "optimizer": {}, "rng": True, "metrics": {}} | state
    (temporary / STATE / "state.json").write_text(json.dumps(told))
    saved = {name: {"value": value} for name, value in flag_values(options or SftOptions()).items()}
    (temporary / "args.json").write_text(json.dumps({"options": saved}))
    return atomic_dir.commit(temporary, path)


@pytest.fixture
def out(tmp_path, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "out"


def options(out, wanted="auto", **more):
    return compose(SftOptions, output_dir=str(out), resume_from_checkpoint=wanted, **more)


V0, V1 = "v0-20260101-000000", "v1-20260101-000000"


def test_auto_takes_the_newest_of_all_versions_or_starts_afresh(out):
    folder, resumed = resume.open_run_dir(options(out))
    assert (folder.parent, resumed) == (out, None)
    save(out / V0, 30, time=1.0)
    newest = save(out / V1, 10, time=2.0)
    folder, resumed = resume.open_run_dir(options(out))
    assert (folder, resumed.checkpoint, resumed.step) == (out / V1, newest, 10)
    assert os.readlink(folder / "last") == "checkpoint-10"


def test_the_order_of_saves_counts_and_not_the_clock(out):
    """Steps 20 and 40 were saved while the clock was two hours ahead."""
    for number, step, time in ((1, 20, 8000.0), (2, 40, 8100.0), (3, 60, 900.0), (4, 80, 1000.0)):
        newest = save(out / V0, step, time=time, saves=number)
    folder, resumed = resume.open_run_dir(options(out, save_total_limit=2))
    assert resumed.checkpoint == newest
    assert resumed.notes == [
        "checkpoint-80 was saved after checkpoint-20, checkpoint-40, though its date is earlier: a clock was set "
        "back. The order of the saves counts"
    ]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-60", "checkpoint-80"]


def test_saves_without_a_number_come_first_and_folders_go_by_time(out):
    """A checkpoint of version 0.1 has no number; those of two folders have nothing but their dates in common."""
    save(out / V0, 40, time=8100.0)
    newest = save(out / V0, 60, time=900.0, saves=1)
    save(out / V1, 10, time=800.0, saves=7)
    assert resume.open_run_dir(options(out))[1].checkpoint == newest


def test_a_run_through_a_link_is_refused_while_another_is_at_work(out, tmp_path):
    older, _ = save(out / V0, 1), save(out / V0, 2)
    linked = tmp_path / "link"
    linked.symlink_to(out)
    code = (
        "import sys; from megaswift.tasks.run import resume; from megaswift.tasks.options import SftOptions;"
        "from megaswift.bridge.option_groups import compose;"
        "resume.open_run_dir(compose(SftOptions, output_dir=sys.argv[1], resume_from_checkpoint=sys.argv[2]));"
        "print('open', flush=True); sys.stdin.read()"
    )
    line = [sys.executable, "-c", code, str(linked), str(linked / V0 / older.name)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"open\n"
        with pytest.raises(ValueError, match="another run uses"):
            lock_run_dir(out / V0, patience=0.5)
        first.communicate()


def test_a_damaged_one_is_named_and_the_one_before_taken(out):
    whole, torn = save(out / V0, 1), save(out / V0, 2)
    (torn / STATE / "state.json").write_text("{}")
    _, resumed = resume.open_run_dir(options(out, save_total_limit=1))
    assert resumed.checkpoint == whole
    assert f"{torn} is damaged and was skipped: {STATE}/state.json has 2 bytes instead of" in resumed.notes[0]
    assert whole.is_dir(), "nor does the limit take it"
    with pytest.raises(ValueError, match=f"{re.escape(str(torn))}: it is damaged"):
        resume.open_run_dir(options(out, str(torn)))
    for path in (whole, torn):
        (path / "manifest.json").unlink()
    assert verify_checkpoint(whole) == ["manifest.json is missing"]
    with pytest.raises(ValueError, match=r"latest: no complete checkpoint in .*checkpoint-2 is damaged"):
        resume.open_run_dir(options(out, "latest"))


def test_a_folder_goes_on_where_it_is_or_in_a_new_one(out, tmp_path):
    older, _ = save(out / V0, 1), save(out / V0, 2)
    assert resume.open_run_dir(options(out, str(older)))[0] == out / V0
    other = save(tmp_path / "elsewhere" / V0, 1)
    folder, resumed = resume.open_run_dir(options(out, str(other)))
    assert folder.name.startswith("v1-")
    assert resumed.checkpoint == other


def test_what_is_lacking_stops_the_run_unless_it_is_known(out):
    path = save(out / V0, 1, optimizer=None, rng=False)
    with pytest.raises(ValueError, match=r"lacks the optimizer's state.*set --no_load_optim true"):
        resume.open_run_dir(options(out))
    with pytest.raises(ValueError, match=r"lacks the states of random numbers.*set --no_load_rng true"):
        resume.open_run_dir(options(out, no_load_optim=True))
    assert resume.open_run_dir(options(out, no_load_optim=True, no_load_rng=True))[1].checkpoint == path
    old = save(out / V1, 3, time=9.0)
    (old / STATE / "state.json").unlink()
    (old / STATE).rmdir()
    manifest = json.loads((old / "manifest.json").read_text())
    manifest["files"].pop(f"{STATE}/state.json")
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"it has no training_state .*set it as --model"):
        resume.open_run_dir(options(out))


def test_changed_options_are_listed(out):
    save(out / V0, 1, options=options(out, lr=2e-5, save_steps=7))
    _, resumed = resume.open_run_dir(options(out, lr=1e-5))
    assert resumed.notes == ["changed since checkpoint-1: --lr 1e-05 (was 2e-05)"]


def test_processes_that_torchrun_starts_again_find_their_folder(out, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    mine, _ = resume.open_run_dir(options(out, None))
    save(out / "v9-20260101-000000", 5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resume.open_run_dir(options(out, None)) == (mine, None)
    save(mine, 9)  # of an earlier run into this folder
    path = save(mine, 3, saves=1)
    assert resume.open_run_dir(options(out, None))[1].checkpoint == path
    monkeypatch.setenv(resume.STARTED, "another launch")
    assert resume.open_run_dir(options(out, None))[0] not in (mine, None)


def test_what_the_run_still_reads_is_kept(out):
    base = save(out / V0, 1)
    for step in (2, 3):
        save(out / V0, step)
    folder, _ = resume.open_run_dir(options(out, "latest", model=str(base), save_total_limit=1))
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]


def test_best_is_by_the_metric(tmp_path):
    for step, (loss, accuracy) in enumerate(((3.0, 0.1), (1.0, 0.2), (2.0, 0.9)), start=1):
        save(tmp_path, step, metrics={"eval_loss": loss, "eval_accuracy": accuracy})
    save(tmp_path, 4)
    save(tmp_path, 5, metrics={"eval_loss": float("nan")})
    assert best(tmp_path, "eval_loss", greater=False).name == "checkpoint-2"
    assert best(tmp_path, "eval_accuracy", greater=True).name == "checkpoint-3"
    assert best(tmp_path, "eval_f1", greater=True) is None


@pytest.mark.parametrize(
    ("metric", "found"),
    [("loss", 100), ("jsd", 100), ("completions/clipped_ratio", 100), ("reward", 300), ("rewards/margins", 300)],
)
def test_which_end_of_a_metric_is_the_best(metric, found, tmp_path):
    """The best of three stays where two are kept."""
    for step, value in ((100, 0.1), (200, 0.3), (300, 0.5)):
        newest = save(tmp_path, step, metrics={f"eval_{metric}": value})
    resume.update_run_dir(compose(SftOptions, model="m", metric_for_best_model=metric, save_total_limit=1), newest)
    assert (tmp_path / "best").resolve().name == f"checkpoint-{found}"
    assert (tmp_path / f"checkpoint-{found}").exists()


def test_a_run_takes_away_what_dead_ones_have_left(tmp_path):
    for name in (
        ".checkpoint-2.partial-elsewhere-1",
        ".checkpoint-5-replaced.partial-elsewhere-2",
        "checkpoint-7-merged",
    ):
        (tmp_path / name).mkdir()
    for kept in ("checkpoint-5", "checkpoint-3-merged", "checkpoint-best-merged"):
        (tmp_path / kept).mkdir()
    (tmp_path / ".last.partial-elsewhere-3").symlink_to("checkpoint-1")
    (tmp_path / ".shared-0a").touch()
    lock_run_dir(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "checkpoint-5", "checkpoint-3-merged", "checkpoint-best-merged"}
