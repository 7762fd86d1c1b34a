"""Resume of a run: selection, verification and state of its checkpoint."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from ...bridge.option_groups import flag_value, flag_values, group_of
from ...templates.json_types import Json, JsonObject
from ..options import (
    CheckpointOptions,
    CriticOptions,
    LoggingOptions,
    ProfileOptions,
    ReferenceOptions,
    ResumeOptions,
    SftOptions,
    TeacherOptions,
)
from .run_dir import (
    LAUNCH,
    STATE,
    Verify,
    checkpoints,
    clean_idle_run_dirs,
    default_output_dir,
    last_save,
    lock_run_dir,
    new_run_dir,
    newest_first,
    run_dirs,
    saved_at,
    state_of,
    update_links_and_prune,
    verify_checkpoint,
)

# Options whose changes are not reported, because they do not affect the numbers of training.
NON_NUMERIC_GROUPS = (CheckpointOptions, ResumeOptions, LoggingOptions, ProfileOptions)
IGNORED_CHANGES = {field.name for kind in NON_NUMERIC_GROUPS for field in fields(kind)} | {
    "hub_token", "ddp_timeout", "dataset_num_proc", "load_from_cache_file", "mcore_adapter", "adapters",
    "rollout_num_gpus", "vllm_server_base_url", "plan",
}  # fmt: skip
LESS_IS_BETTER = ("loss", "mse", "kl", "jsd", "rejected", "clipped_ratio")  # suffixes of metrics
STARTED = "MEGASWIFT_STARTED"  # environment variable: id of the launch
OUTPUT = "MEGASWIFT_OUTPUT"  # environment variable: parent of the launch's run folder
_updating = threading.Lock()  # the thread of --async_save updates a run folder while the main one may


@dataclass(frozen=True)
class Resumed:
    """Checkpoint that a run resumes from."""

    checkpoint: Path
    state: JsonObject  # state.json
    notes: list[str]  # for the user

    @property
    def step(self) -> int:
        """Last completed step."""
        return self.state["step"]

    @property
    def folder(self) -> Path:
        """Folder of the training state, beside the weights."""
        return self.checkpoint / STATE


def requested_checkpoint(options: SftOptions) -> str | None:
    """Return --resume_from_checkpoint, or the weights whose run --finetune false continues."""
    if options.resume.finetune:
        return options.resume.resume_from_checkpoint
    if options.tuner.has_adapters:
        return options.mcore_adapter or next(iter(options.adapters), None)
    return options.mcore_model or options.model


def newest_checkpoint(options: SftOptions) -> Path | None:
    """Return the checkpoint that a run resumes from if it is whole; None if there is none."""
    requested = requested_checkpoint(options)
    if requested not in ("auto", "latest"):
        return Path(requested).expanduser() if requested else None
    output = Path(options.checkpoint.output_dir or default_output_dir(options.mcore_model or options.model))
    return next(newest_first(run_dirs(output.expanduser())), None)


def open_run_dir(options: SftOptions, verify: Verify = verify_checkpoint) -> tuple[Path, Resumed | None]:
    """Return the locked run folder, and the checkpoint to resume from. One process of a run calls this.

    verify: returns the faults of a checkpoint's files (verification.py has a distributed one). Raises ValueError or
    OSError if --resume_from_checkpoint is not possible or the folder cannot be written.
    """
    output = Path(options.checkpoint.output_dir or default_output_dir(options.mcore_model or options.model))
    output = output.expanduser().resolve()
    folder, checkpoint, notes = _choose_checkpoint(options, output, verify)
    if (launch := _launch_id()) and _saves_before_launch(folder) is None:
        (folder / LAUNCH).write_text(f"{launch}\n{last_save(folder)}")
    clean_idle_run_dirs(other for other in run_dirs(output) if other != folder)
    if checkpoint is None:
        return folder, None
    if checkpoint.parent == folder:  # the run may have been killed before it updated the links
        update_run_dir(options, checkpoint)
    state = state_of(checkpoint)
    if state is None:
        raise ValueError(
            f"--resume_from_checkpoint {checkpoint}: it has no {STATE} (an export, or an older version). To start a "
            "new run from its weights, set it as --model (or --mcore_model, --adapters) and remove the flag"
        )
    _check_complete(checkpoint, state, options)
    notes += _changes(checkpoint, options)
    return folder, Resumed(checkpoint, state, notes)


def best_metric(options: SftOptions) -> str:
    """Return the evaluation's metric that selects the best checkpoint, as `eval_<name>`."""
    return f"eval_{(options.checkpoint.metric_for_best_model or options.usual_metric).removeprefix('eval_')}"


def is_greater_better(options: SftOptions) -> bool:
    """Return whether a greater value of `best_metric` is better."""
    is_greater = options.checkpoint.greater_is_better
    return not best_metric(options).endswith(LESS_IS_BETTER) if is_greater is None else is_greater


def update_run_dir(options: SftOptions, newest: Path, in_use: Collection[Path] = ()) -> None:
    """Update the links of a run folder, and prune its checkpoints by the options, except those `in_use`."""
    checkpoint, metric, is_greater = options.checkpoint, best_metric(options), is_greater_better(options)
    # Folders that the run may still read, and must not prune.
    input_folders = [options.model, options.mcore_model, options.mcore_adapter, *options.adapters]
    if reference := group_of(options, ReferenceOptions):
        input_folders += [reference.ref_model, reference.mcore_ref_model, *reference.ref_adapters]
    if teacher := group_of(options, TeacherOptions):
        input_folders += [teacher.teacher_model, teacher.mcore_teacher_model]
    if critic := group_of(options, CriticOptions):
        input_folders += [critic.critic_model, critic.mcore_critic_model]
    keep = {Path(folder).expanduser().resolve() for folder in input_folders if folder} | set(in_use)
    with _updating:
        update_links_and_prune(
            newest.parent,
            newest,
            checkpoint.save_total_limit,
            metric,
            greater=is_greater,
            keep=keep,
            retain_interval=checkpoint.save_retain_interval,
        )


def _choose_checkpoint(options: SftOptions, output: Path, verify: Verify) -> tuple[Path, Path | None, list[str]]:
    """Return the run folder, the checkpoint to resume from, and notes for the user."""
    requested, notes = requested_checkpoint(options), []
    if restarted := _folder_before_restart(output):  # torchrun has restarted the processes
        lock_run_dir(restarted)
        if checkpoint := _newest_complete([restarted], notes, verify, after=_saves_before_launch(restarted) or 0):
            return restarted, checkpoint, notes
    if requested in ("auto", "latest"):
        if checkpoint := _newest_complete(run_dirs(output), notes, verify):
            return checkpoint.parent, checkpoint, notes
        if requested == "latest":
            details = f" ({'; '.join(notes)})" if notes else ""
            raise ValueError(
                f"--resume_from_checkpoint latest: no complete checkpoint in {output}{details}. Set auto to start a "
                "new run where there is none"
            )
    elif requested is not None:
        checkpoint = Path(requested).expanduser().resolve()
        _verify_or_raise(checkpoint, verify)
        if checkpoint.parent in [folder.resolve() for folder in run_dirs(output)]:
            lock_run_dir(checkpoint.parent)
            return checkpoint.parent, checkpoint, notes
        return restarted or new_run_dir(output, add_version=options.checkpoint.add_version), checkpoint, notes
    # `auto` may have skipped damaged checkpoints, which the new run then replaces.
    return (
        restarted or new_run_dir(output, add_version=options.checkpoint.add_version, replace=requested == "auto"),
        None,
        notes,
    )


def _newest_complete(folders: list[Path], notes: list[str], verify: Verify, after: int = -1) -> Path | None:
    """Return the newest complete checkpoint of these run folders, and lock its folder. Add damaged ones to `notes`.

    after: consider only saves with a higher number.
    """
    for path in newest_first(folders):
        if saved_at(path).number <= after:
            continue
        lock_run_dir(path.parent)
        if not path.is_dir():  # deleted by a run that has just ended
            continue
        if not (faults := verify(path)):
            notes += _later_dates(path)
            return path
        notes.append(f"{path} is damaged and was skipped: {'; '.join(faults)}")
    return None


def _later_dates(newest: Path) -> list[str]:
    """Return a note if an earlier checkpoint of the folder has a later date than the newest one."""
    newest_save = saved_at(newest)
    later_dated = [
        path.name
        for path in checkpoints(newest.parent)
        if 0 < (saved := saved_at(path)).number < newest_save.number and saved.time > newest_save.time
    ]
    if not later_dated:
        return []
    return [
        f"{newest.name} was saved after {', '.join(later_dated)}, though its date is earlier: a clock was set back. "
        "The order of the saves counts"
    ]


def _verify_or_raise(checkpoint: Path, verify: Verify) -> None:
    if not checkpoint.is_dir():
        raise ValueError(f"--resume_from_checkpoint {checkpoint}: no such folder. Set a checkpoint's, latest or auto")
    if faults := verify(checkpoint):
        raise ValueError(
            f"--resume_from_checkpoint {checkpoint}: it is damaged ({'; '.join(faults)}). Set another one, or "
            "latest for the newest complete one"
        )


def _check_complete(checkpoint: Path, state: JsonObject, options: SftOptions) -> None:
    """Raise ValueError if state for an exact resume is missing, unless a flag accepts that."""
    for flag, is_missing, state_name in (
        ("no_load_optim", state["optimizer"] is None, "the optimizer's state (--no_save_optim true)"),
        ("no_load_rng", not state["rng"], "the states of random numbers (--no_save_rng true)"),
    ):
        if is_missing and not flag_value(options, flag):
            raise ValueError(
                f"--resume_from_checkpoint {checkpoint}: it lacks {state_name}. To resume without, set --{flag} true"
            )


def _changes(checkpoint: Path, options: SftOptions) -> Iterator[str]:
    """Yield the options that differ from those of the checkpoint's run."""
    try:
        saved = json.loads((checkpoint / "args.json").read_text(encoding="utf-8"))["options"]
        saved_values = {name: entry["value"] for name, entry in saved.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        yield f"{checkpoint / 'args.json'} cannot be read, so that changed options are unknown"
        return
    for name, value in flag_values(options).items():
        current_value = json.loads(json.dumps(value, default=os.fspath))
        if name not in IGNORED_CHANGES and name in saved_values and saved_values[name] != current_value:
            yield (
                f"changed since {checkpoint.name}: --{name} {_format_value(current_value)} "
                f"(was {_format_value(saved_values[name])})"
            )


def _format_value(value: Json) -> str:
    return json.dumps(value) if isinstance(value, bool | list | dict) or value is None else str(value)


def _launch_id() -> str | None:
    """Return an id of this torchrun, constant over its restarts; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if STARTED in os.environ:
        return os.environ[STARTED]
    try:  # the start time of torchrun, since process ids are reused
        start_time = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        start_time = ""
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()} {start_time}"


def _saves_before_launch(folder: Path) -> int | None:
    """Return the last save number in a folder before this torchrun used it; None if it has not used it."""
    try:
        launch, last_number = (folder / LAUNCH).read_text().split("\n")
        return int(last_number) if launch == _launch_id() else None
    except (OSError, ValueError):
        return None


def launched_run_dir() -> Path | None:
    """Return the run folder of the launch of this process; None if it does not exist yet."""
    launch, output = os.environ.get(STARTED), os.environ.get(OUTPUT)
    for folder in reversed(run_dirs(Path(output))) if launch and output else ():
        with contextlib.suppress(OSError):
            if (folder / LAUNCH).read_text().split("\n")[0] == launch:
                return folder
    return None


def _folder_before_restart(output: Path) -> Path | None:
    """Return the run folder that this torchrun used before it restarted the processes."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    return next((folder for folder in reversed(run_dirs(output)) if _saves_before_launch(folder) is not None), None)
