"""Run folder `<output_dir>/v0-20260131-235959/` with a `checkpoint-N/` for each save.

The links `last` and `best` point to two of these. One process of a run locks the folder, and creates, finds and deletes
its entries.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from ...templates.json_types import JsonObject
from ..system.atomic_dir import (
    MANIFEST,
    SHARED,
    hidden_path,
    is_export,
    os_error_hints,
    read_manifest,
    remove_leftovers,
    sync,
    verify_files,
)

VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
Verify = Callable[[Path], list[str]]  # returns the faults of a checkpoint's files
EVAL_COMMAND = "eval_command.json"  # file of a checkpoint with the metrics that --eval_command printed
STATE = "training_state"  # folder of a checkpoint with the training state, beside the weights
LAUNCH = ".launch"  # file in a run folder with the id of its torchrun
_locks: list[TextIO] = []  # lock files, open until the process ends


def default_output_dir(model: str) -> Path:
    """Return the default of `--output_dir`: `megatron_output/<the model's own name>`."""
    return Path("megatron_output") / (Path(model).resolve().name if Path(model).exists() else model.rsplit("/", 1)[-1])


def new_run_dir(output_dir: str | Path, *, add_version: bool = True, replace: bool = False) -> Path:
    """Make and return `<output_dir>/v{N}-YYYYMMDD-HHMMSS/`, or `output_dir` itself where `add_version` is false.

    One process of a run calls this. Two runs that start in the same second get different folders. Raises OSError if
    the folder cannot be written, ValueError if another run uses it or has left checkpoints and `replace` is false.
    """
    output_dir = Path(output_dir).expanduser().absolute()
    with os_error_hints(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        folder = _new_version(output_dir) if add_version else output_dir
    lock_run_dir(folder)
    if not replace and (existing := checkpoints(folder)):
        raise ValueError(
            f"--add_version false: {folder} has {', '.join(path.name for path in existing)} of another run, which this "
            "one would replace or delete. Set --resume_from_checkpoint auto to resume from them, set another "
            "--output_dir, or remove --add_version false"
        )
    return folder


def _new_version(output_dir: Path) -> Path:
    version = max((number for number, _ in _versions(output_dir)), default=-1) + 1
    while True:
        folder = output_dir / f"v{version}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            folder.mkdir()  # atomic: only one of two runs succeeds
            return folder
        except FileExistsError:
            version += 1


def _versions(output_dir: Path) -> list[tuple[int, Path]]:
    matches = [(VERSION.fullmatch(entry.name), entry) for entry in output_dir.iterdir()]
    return sorted((int(match[1]), entry) for match, entry in matches if match and entry.is_dir())


def run_dirs(output_dir: Path) -> list[Path]:
    """Return `output_dir` itself (--add_version false), then its run folders, oldest version first."""
    return [output_dir, *(folder for _, folder in _versions(output_dir))] if output_dir.is_dir() else []


def lock_run_dir(folder: Path, patience: float = 10.0) -> None:
    """Lock a run folder for the lifetime of this process, and remove leftovers of earlier ones.

    patience: seconds to wait for a killed run to end. Raises ValueError if another run holds the lock.
    """
    with os_error_hints(folder):
        stream = (folder / ".lock").open("a")  # also checks that the folder is writable
        _wait_for(stream, folder, patience)
        _locks.append(stream)
        _clean(folder)


def check_idle(folder: Path, patience: float = 10.0) -> None:
    """Raise ValueError if another process of this machine holds the lock of a run folder for `patience` seconds."""
    with contextlib.suppress(OSError), (folder / ".lock").open("r+") as stream:  # locked, and released when closed
        _wait_for(stream, folder, patience)


def is_running(folder: Path) -> bool:
    """Return whether a process of this machine holds the lock of a run folder."""
    if _has_lock(folder / ".lock"):
        return True
    try:
        with (folder / ".lock").open("r+") as stream:  # locked, and released when closed
            return not _try_lock(stream)
    except OSError:
        return False


def _wait_for(stream: TextIO, folder: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while not _try_lock(stream):
        if time.monotonic() > deadline:
            fix = "set another --output_dir"
            if VERSION.fullmatch(folder.name):
                fix = "remove --resume_from_checkpoint to start a new run"
            raise ValueError(f"another run uses {folder}. Wait for its end, or {fix}")
        time.sleep(0.2)


def clean_idle_run_dirs(folders: Iterable[Path]) -> None:
    """Remove half-written files of this machine's dead runs from their folders.

    Folders that this process has locked (by any path) are skipped: POSIX drops a process's locks on a file when the
    process closes any descriptor of it.
    """
    for folder in folders:
        lock_file = folder / ".lock"
        if _has_lock(lock_file):
            continue
        with (
            contextlib.suppress(OSError),
            lock_file.open("a") if lock_file.exists() else contextlib.nullcontext() as stream,
        ):
            if stream is None or _try_lock(stream):  # processes of other containers on this machine are not seen
                remove_leftovers(folder)


def _has_lock(lock: Path) -> bool:
    """Return whether this process has locked a file."""
    return lock.exists() and any(os.path.samestat(lock.stat(), os.fstat(stream.fileno())) for stream in _locks)


def _clean(folder: Path) -> None:
    """Remove the leftovers of a killed run."""
    with os_error_hints(folder):
        remove_leftovers(folder, is_locked=True)
        for marker in folder.glob(f"{SHARED}*"):
            marker.unlink(missing_ok=True)
        newest = max((step_of(path) for path in checkpoints(folder)), default=0)
        for entry in folder.glob("checkpoint-*-merged"):  # its run was killed before the adapter's folder was renamed
            if step_of(entry) > newest and not is_export(entry / "args.json"):
                _delete(entry)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint or its merged weights by the folder's name; 0 for other names."""
    match = CHECKPOINT.fullmatch(checkpoint.name.removesuffix("-merged"))
    return int(match[1]) if match else 0


def _try_lock(stream: TextIO) -> bool:
    """Lock a file for the lifetime of this process, not its children. Return False if another process has the lock."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # other errors: this file system has no locks
    return True


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run folder, oldest step first."""
    entries = [
        (int(match[1]), entry)
        for entry in Path(folder).iterdir()
        if (match := CHECKPOINT.fullmatch(entry.name)) and entry.is_dir()  # not a stale link
    ]
    return [entry for _, entry in sorted(entries)]


def merged_path(checkpoint: Path) -> Path:
    """Return the path of the merged weights of an adapter's checkpoint."""
    return checkpoint.with_name(f"{checkpoint.name}-merged")


def verify_checkpoint(
    checkpoint: Path, verify: Callable[[Path], list[str]] = lambda checkpoint: verify_files(checkpoint, checksums=True)
) -> list[str]:
    """Return the faults of a checkpoint's files, one line per file; empty if complete. Reads every byte.

    verify: compares the files with the manifest (verification.py divides this work among the ranks).
    """
    try:
        return verify(checkpoint) if read_manifest(checkpoint) else [f"{MANIFEST} is missing"]
    except ValueError as error:
        return [str(error)]


def state_of(checkpoint: Path) -> JsonObject | None:
    """Return the content of a checkpoint's state.json, None if it is missing or unreadable."""
    try:
        state = json.loads((checkpoint / STATE / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def metrics_of(checkpoint: Path) -> JsonObject:
    """Return the metrics of the evaluation at a checkpoint; empty without one."""
    return (state_of(checkpoint) or {}).get("metrics") or {}


def command_metrics(checkpoint: Path) -> JsonObject:
    """Return the metrics that --eval_command printed about a checkpoint; empty without any."""
    try:
        metrics = json.loads((checkpoint / EVAL_COMMAND).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return metrics if isinstance(metrics, dict) else {}


class Saved(NamedTuple):
    """Position of a checkpoint among the saves into its run folder; compares by that order."""

    number: int  # counts the saves into the folder from 1; 0 where state.json lacks it (version 0.1)
    time: float  # seconds since 1970, by the clock of the machine that saved it
    step: int


def saved_at(checkpoint: Path) -> Saved:
    """Return the position of a checkpoint among the saves.

    Within a folder the numbers decide, since a clock may be set back. Across folders only the time is comparable.
    """
    state = state_of(checkpoint) or {}
    number, seconds = state.get("saves"), state.get("time")
    if not isinstance(seconds, float):
        with contextlib.suppress(FileNotFoundError):  # another run has deleted it
            seconds = checkpoint.stat().st_mtime
    return Saved(
        number if isinstance(number, int) else 0, seconds if isinstance(seconds, float) else 0.0, step_of(checkpoint)
    )


def last_save(folder: Path) -> int:
    """Return the highest save number in a run folder; 0 if there is none."""
    return max((saved_at(path).number for path in checkpoints(folder)), default=0)


def newest_first(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the checkpoints of run folders, newest first: by save number within a folder, by time across folders.

    Checkpoints that have lost their state.json, and so their position, come first, so that verification reports them.
    """
    queues = []
    for folder in folders:
        unordered = [path for path in checkpoints(folder) if _has_lost_state(path)]
        yield from reversed(unordered)
        queues.append(
            sorted(((saved_at(path), path) for path in checkpoints(folder) if path not in unordered), reverse=True)
        )
    while queues := [queue for queue in queues if queue]:
        yield max(queues, key=lambda queue: queue[0][0].time).pop(0)[1]


def _has_lost_state(checkpoint: Path) -> bool:
    """Return whether a checkpoint was saved with a state.json that is missing or unreadable."""
    try:
        return state_of(checkpoint) is None and f"{STATE}/state.json" in read_manifest(checkpoint)
    except ValueError:
        return True


def best(folder: Path, metric: str, *, greater: bool) -> Path | None:
    """Return the checkpoint of a run folder with the best value of a metric; None if none has it."""
    candidates = []
    for path in checkpoints(folder):
        value = (command_metrics(path) | metrics_of(path)).get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            candidates.append((value if greater else -value, path))
    return max(candidates, default=(0, None), key=lambda candidate: candidate[0])[1]


def link(folder: Path, name: str, checkpoint: Path) -> None:
    """Make the link `name` in a run folder point to one of its checkpoints, where the file system has links."""
    temporary = hidden_path(folder / name)
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(checkpoint.name)
        temporary.replace(folder / name)
        sync(folder)


def update_links_and_prune(
    folder: Path,
    newest: Path,
    save_total_limit: int | None,
    metric: str,
    *,
    greater: bool,
    keep: Collection[Path] = (),
    retain_interval: int | None = None,
) -> None:
    """Link `last` to the newest checkpoint and `best` to the one with the best metric, then prune.

    Neither these two nor the checkpoints in `keep` are deleted.
    """
    link(folder, "last", newest)
    best_checkpoint = best(folder, metric, greater=greater)
    if best_checkpoint is not None:
        link(folder, "best", best_checkpoint)
    keep = {*keep, newest, *([best_checkpoint] if best_checkpoint else [])}
    prune_checkpoints(folder, save_total_limit, keep, retain_interval=retain_interval)


def prune_checkpoints(
    folder: str | Path,
    save_total_limit: int | None,
    keep: Collection[Path] = (),
    *,
    retain_interval: int | None = None,
) -> list[Path]:
    """Delete the oldest checkpoints beyond `save_total_limit` (None: keep all), and return them.

    retain_interval: older checkpoints of steps that are multiples of it do not count; the default limit is then 1.

    Merged weights beside a checkpoint are deleted with it, unless an export made them. The newest save is never
    deleted, even if an earlier run left later steps here. Checkpoints in `keep` count, but are not deleted.
    """
    if save_total_limit is None and retain_interval is None:
        return []
    ordered = sorted(checkpoints(folder), key=saved_at)
    if retain_interval is not None:
        ordered = [path for path in ordered if path == ordered[-1] or step_of(path) % retain_interval]
    protected = {path.resolve() for path in keep}
    deletable = [path for path in ordered[:-1] if path.resolve() not in protected]
    deleted = deletable[: max(0, len(ordered) - max(1, save_total_limit or 1))]
    for path in deleted:
        merged = merged_path(path)
        _delete(*([merged] if merged.is_dir() and not is_export(merged / "args.json") else []), path)
    return deleted


def _delete(*folders: Path) -> None:
    """Rename folders to hidden names, then delete them, because a long deletion may be interrupted."""
    for folder in folders:
        folder.rename(hidden_path(folder))
    for folder in folders:
        shutil.rmtree(hidden_path(folder), ignore_errors=True)
