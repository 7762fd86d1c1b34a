"""Going on with a run: which checkpoint from, whether it is whole and has all that exactness needs, and its state."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..options import (
    CheckpointOptions,
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
    Faults,
    checkpoints,
    clean_others,
    default_output_dir,
    faults,
    last_save,
    new_run_folder,
    newest_first,
    run_folders,
    saved_at,
    state_of,
    take,
    tidy,
)

# Options that may differ without a word: they change no number of the training.
NUMBERLESS = (CheckpointOptions, ResumeOptions, LoggingOptions, ProfileOptions)
SILENT = {field.name for kind in NUMBERLESS for field in fields(kind)} | {
    "hub_token", "ddp_timeout", "dataset_num_proc", "load_from_cache_file", "mcore_adapter", "adapters",
}  # fmt: skip
LESS_IS_BETTER = ("loss", "mse", "kl", "jsd", "rejected", "clipped_ratio")  # how the names of such metrics end
STARTED = "MEGASWIFT_STARTED"  # of one launch of ours; set for its processes, that of the launcher has told the notes
OUTPUT = "MEGASWIFT_OUTPUT"  # of the same launch: the folder of its run's folder


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run goes on from."""

    checkpoint: Path
    state: dict[str, Any]  # state.json
    notes: list[str]  # what a user should know

    @property
    def step(self) -> int:
        """The last one that is done."""
        return self.state["step"]

    @property
    def folder(self) -> Path:
        """Of what is no weights."""
        return self.checkpoint / STATE


def asked_for(options: SftOptions) -> str | None:
    """What --resume_from_checkpoint has, or --finetune false says by the weights given: their run goes on."""
    if options.finetune:
        return options.resume_from_checkpoint
    if options.tuner_type == "lora":
        return options.mcore_adapter or next(iter(options.adapters), None)
    return options.mcore_model or options.model


def open_folder(options: SftOptions, faults: Faults = faults) -> tuple[Path, Resumed | None]:
    """The folder that the run is to write, locked, and the checkpoint to go on from. For one process of a run.

    faults: tells what is wrong with the files of a checkpoint (verification.py has one that shares the work).
    Raises ValueError or OSError, with the cure, where --resume_from_checkpoint cannot be followed or the folder cannot
    be written.
    """
    output = Path(options.output_dir or default_output_dir(options.mcore_model or options.model))
    output = output.expanduser().resolve()
    folder, checkpoint, notes = _choose(options, output, faults)
    if (launch := _launch()) and _started(folder) is None:
        (folder / LAUNCH).write_text(f"{launch}\n{last_save(folder)}")
    clean_others(other for other in run_folders(output) if other != folder)
    if checkpoint is None:
        return folder, None
    if checkpoint.parent == folder:  # its run may have been killed before it had done this
        tidy_for(options, checkpoint)
    state = state_of(checkpoint)
    if state is None:
        raise ValueError(
            f"{checkpoint} has no {STATE}: an earlier version saved it, or an export. Its weights can begin a new run: "
            "give it as --model (or --mcore_model, --adapters), without --resume_from_checkpoint"
        )
    _check_complete(checkpoint, state, options)
    notes += _changes(checkpoint, options)
    return folder, Resumed(checkpoint, state, notes)


def tidy_for(options: SftOptions, newest: Path) -> None:
    """Have the folder of a run be what the options say, with its newest checkpoint in its place."""
    metric = f"eval_{(options.metric_for_best_model or options.usual_metric).removeprefix('eval_')}"
    greater = not metric.endswith(LESS_IS_BETTER) if options.greater_is_better is None else options.greater_is_better
    read = [options.model, options.mcore_model, options.mcore_adapter, *options.adapters]  # until the end of the run
    if isinstance(options, ReferenceOptions):
        read += [options.ref_model, options.mcore_ref_model, *options.ref_adapters]
    if isinstance(options, TeacherOptions):
        read += [options.teacher_model, options.mcore_teacher_model]
    keep = {Path(folder).expanduser().resolve() for folder in read if folder}
    tidy(newest.parent, newest, options.save_total_limit, metric, greater=greater, keep=keep)


def _choose(options: SftOptions, output: Path, faults: Faults) -> tuple[Path, Path | None, list[str]]:
    """The run's folder, the checkpoint, and notes."""
    wanted, notes = asked_for(options), []
    if own := _own_folder(output):  # torchrun has started the processes once more
        take(own)
        if checkpoint := _newest_whole([own], notes, faults, after=_started(own) or 0):
            return own, checkpoint, notes
    if wanted in ("auto", "latest"):
        if checkpoint := _newest_whole(run_folders(output), notes, faults):
            return checkpoint.parent, checkpoint, notes
        if wanted == "latest":
            said = f" ({'; '.join(notes)})" if notes else ""
            raise ValueError(
                f"--resume_from_checkpoint latest: there is no whole checkpoint under {output}{said}. Give auto to "
                "start afresh where there is none"
            )
    elif wanted is not None:
        checkpoint = Path(wanted).expanduser().resolve()
        _check_whole(checkpoint, faults)
        if checkpoint.parent in [folder.resolve() for folder in run_folders(output)]:
            take(checkpoint.parent)
            return checkpoint.parent, checkpoint, notes
        return own or new_run_folder(output, add_version=options.add_version), checkpoint, notes
    # `auto` may have left damaged ones aside: a run that is to go on whatever happened begins in their place.
    return own or new_run_folder(output, add_version=options.add_version, replace=wanted == "auto"), None, notes


def _newest_whole(folders: list[Path], notes: list[str], faults: Faults, after: int = -1) -> Path | None:
    """The newest checkpoint of these run folders that is whole; its folder is locked. Notes name those that are not.

    `after`: only saves into its folder with higher numbers count.
    """
    for path in newest_first(folders):
        if saved_at(path).number <= after:
            continue
        take(path.parent)
        if not path.is_dir():  # a run that has just ended has deleted it
            continue
        if not (wrong := faults(path)):
            notes += _later_dates(path)
            return path
        notes.append(f"{path} is damaged and left aside: {'; '.join(wrong)}")
    return None


def _later_dates(newest: Path) -> list[str]:
    """Return a note if a checkpoint that was saved before the newest one of its folder has a later date."""
    when = saved_at(newest)
    later = [
        path.name
        for path in checkpoints(newest.parent)
        if 0 < (at := saved_at(path)).number < when.number and at.time > when.time
    ]
    if not later:
        return []
    return [
        f"{newest.name} was saved after {', '.join(later)}, though its date is earlier: a clock has been set back. The "
        "order of the saves counts"
    ]


def _check_whole(checkpoint: Path, faults: Faults) -> None:
    if not checkpoint.is_dir():
        raise ValueError(f"--resume_from_checkpoint {checkpoint}: no such folder. Give a checkpoint's, latest or auto")
    if wrong := faults(checkpoint):
        raise ValueError(
            f"--resume_from_checkpoint {checkpoint}: it is not as it was written ({'; '.join(wrong)}). Give another, "
            "or latest for the newest whole one"
        )


def _check_complete(checkpoint: Path, state: dict[str, Any], options: SftOptions) -> None:
    """What a run lacks to go on exactly, the user must know."""
    for flag, lacking, what in (
        ("no_load_optim", state["optimizer"] is None, "the optimizer's state (--no_save_optim true)"),
        ("no_load_rng", not state["rng"], "the states of random numbers (--no_save_rng true)"),
    ):
        if lacking and not getattr(options, flag):
            raise ValueError(f"{checkpoint} lacks {what}. To go on without, give --{flag} true")


def _changes(checkpoint: Path, options: SftOptions) -> Iterator[str]:
    """The options that are not what they were when a checkpoint was saved."""
    try:
        saved = json.loads((checkpoint / "args.json").read_text(encoding="utf-8"))["options"]
        former = {name: entry["value"] for name, entry in saved.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        yield f"{checkpoint / 'args.json'} cannot be read: which options have changed is not known"
        return
    for name, value in vars(options).items():
        now = json.loads(json.dumps(value, default=os.fspath))
        if name not in SILENT and name in former and former[name] != now:
            yield f"changed since {checkpoint.name}: --{name} {_shown(now)} (was {_shown(former[name])})"


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list | dict) or value is None else str(value)


def _launch() -> str | None:
    """What tells one torchrun from another, over its attempts; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if STARTED in os.environ:
        return os.environ[STARTED]
    try:  # when the torchrun of somebody else began, since numbers of processes come again
        began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = ""
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()} {began}"


def _started(folder: Path) -> int | None:
    """The number of the last save into a folder before this torchrun began its run there; None where it did not."""
    try:
        launch, before = (folder / LAUNCH).read_text().split("\n")
        return int(before) if launch == _launch() else None
    except (OSError, ValueError):
        return None


def launched_folder() -> Path | None:
    """The folder of the run that this process has launched; None while it has none."""
    launch, output = os.environ.get(STARTED), os.environ.get(OUTPUT)
    for folder in reversed(run_folders(Path(output))) if launch and output else ():
        with contextlib.suppress(OSError):
            if (folder / LAUNCH).read_text().split("\n")[0] == launch:
                return folder
    return None


def _own_folder(output: Path) -> Path | None:
    """Where this same torchrun had its run before it started the processes again."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    return next((folder for folder in reversed(run_folders(output)) if _started(folder) is not None), None)
