"""The folder of a run: `<output_dir>/v0-20260131-235959/`, with a `checkpoint-N/` for each time that it was saved.

`last` and `best` in it are links to two of these. One process of a run holds the folder's lock, and makes, finds and
deletes what is in it.
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
from typing import Any, NamedTuple

from ..system.atomic_dir import MANIFEST, SHARED, damage, explained, hidden, listed, of_export, remove_leftovers, sync

VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
Faults = Callable[[Path], list[str]]  # tells what is wrong with the files of a checkpoint
STATE = "training_state"  # of a checkpoint: the folder with what a run goes on from, beside the weights
LAUNCH = ".launch"  # in a run's folder: whose it is
_locks: list[Any] = []  # open as long as this process lives


def default_output_dir(model: str) -> Path:
    """Where a run goes when `--output_dir` is not given: `megatron_output/<the model's own name>`."""
    return Path("megatron_output") / (Path(model).resolve().name if Path(model).exists() else model.rsplit("/", 1)[-1])


def new_run_folder(output_dir: str | Path, *, add_version: bool = True, replace: bool = False) -> Path:
    """Make `<output_dir>/v{N}-YYYYMMDD-HHMMSS/`, or `output_dir` itself where `add_version` is false, and return it.

    To be called by one process of a run. Two runs that start in the same second get different folders.
    Raises OSError, with the cure, where the folder cannot be written, ValueError where another run is at work there, or
    has left checkpoints that are not to be replaced.
    """
    output_dir = Path(output_dir).expanduser().absolute()
    with explained(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        folder = _new_version(output_dir) if add_version else output_dir
    take(folder)
    if not replace and (there := checkpoints(folder)):
        raise ValueError(
            f"--add_version false: {folder} has {', '.join(path.name for path in there)} of another run, which this "
            "one would replace or delete. Set --resume_from_checkpoint auto to resume from there, or another "
            "--output_dir, or leave --add_version false out"
        )
    return folder


def _new_version(output_dir: Path) -> Path:
    version = max((number for number, _ in _versions(output_dir)), default=-1) + 1
    while True:
        folder = output_dir / f"v{version}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            folder.mkdir()  # is the lock: exactly one of two runs makes it
            return folder
        except FileExistsError:
            version += 1


def _versions(output_dir: Path) -> list[tuple[int, Path]]:
    matches = [(VERSION.fullmatch(entry.name), entry) for entry in output_dir.iterdir()]
    return sorted((int(match[1]), entry) for match, entry in matches if match and entry.is_dir())


def run_folders(output_dir: Path) -> list[Path]:
    """The folders of runs in `output_dir`, oldest version first, and itself (--add_version false)."""
    return [output_dir, *(folder for _, folder in _versions(output_dir))] if output_dir.is_dir() else []


def take(folder: Path, patience: float = 10.0) -> None:
    """Lock the folder of a run for this process until it ends, and clean it of what earlier ones left half-written.

    A run that was killed may still be ending: it gets `patience` seconds. Raises ValueError where another is at work.
    """
    with explained(folder):
        stream = (folder / ".lock").open("a")  # which tries as well whether the folder can be written
        _wait_for(stream, folder, patience)
        _locks.append(stream)
        _clean(folder)


def check_idle(folder: Path, patience: float = 10.0) -> None:
    """Raise ValueError if another process of this machine keeps the lock of a run's folder for `patience` seconds."""
    with contextlib.suppress(OSError), (folder / ".lock").open("r+") as stream:  # taken, and released when closed
        _wait_for(stream, folder, patience)


def _wait_for(stream: Any, folder: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while not _locked(stream):
        if time.monotonic() > deadline:
            fix = "set another --output_dir"
            if VERSION.fullmatch(folder.name):
                fix = "start a run of its own beside it, without --resume_from_checkpoint"
            raise ValueError(f"another run is at work in {folder}: wait for its end, or {fix}")
        time.sleep(0.2)


def clean_others(folders: Iterable[Path]) -> None:
    """Remove what runs of this machine that are dead have left half-written in their folders.

    Folders that this process has locked are skipped, by whatever path: POSIX drops a process's locks on a file as soon
    as the process closes any descriptor of it.
    """
    for folder in folders:
        lock = folder / ".lock"
        if _is_ours(lock):
            continue
        with contextlib.suppress(OSError), lock.open("a") if lock.exists() else contextlib.nullcontext() as stream:
            if stream is None or _locked(stream):  # a process of this machine's other containers is not seen
                remove_leftovers(folder)


def _is_ours(lock: Path) -> bool:
    """Return whether this process has locked a file."""
    return lock.exists() and any(os.path.samestat(lock.stat(), os.fstat(stream.fileno())) for stream in _locks)


def _clean(folder: Path) -> None:
    """Of what a run that was killed has left."""
    with explained(folder):
        remove_leftovers(folder, ours=True)
        for mark in folder.glob(f"{SHARED}*"):
            mark.unlink(missing_ok=True)
        newest = max((_step(path) for path in checkpoints(folder)), default=0)
        for entry in folder.glob("checkpoint-*-merged"):  # its run was killed before the adapter's own had its place
            if _step(entry) > newest and not of_export(entry / "args.json"):
                _delete(entry)


def _step(checkpoint: Path) -> int:
    """Of a checkpoint's folder, or that of its merged weights; 0 for one that is called otherwise."""
    match = CHECKPOINT.fullmatch(checkpoint.name.removesuffix("-merged"))
    return int(match[1]) if match else 0


def _locked(stream: Any) -> bool:
    """Of a process, not of its children; gone with it, however it ends."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # else this file system has no locks
    return True


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints of a run folder, oldest step first."""
    entries = [
        (int(match[1]), entry)
        for entry in Path(folder).iterdir()
        if (match := CHECKPOINT.fullmatch(entry.name)) and entry.is_dir()  # not a link to where one was
    ]
    return [entry for _, entry in sorted(entries)]


def merged_beside(checkpoint: Path) -> Path:
    """Where the merged weights of an adapter's checkpoint are."""
    return checkpoint.with_name(f"{checkpoint.name}-merged")


def faults(
    checkpoint: Path, verify: Callable[[Path], list[str]] = lambda checkpoint: damage(checkpoint, checksums=True)
) -> list[str]:
    """Return what is wrong with the files of a checkpoint, a line a file; every byte is read. Empty if it is whole.

    verify: compares the files with the manifest (verification.py shares this work among the ranks).
    """
    try:
        return verify(checkpoint) if listed(checkpoint) else [f"{MANIFEST} is missing"]
    except ValueError as error:
        return [str(error)]


def state_of(checkpoint: Path) -> dict[str, Any] | None:
    """What state.json of a checkpoint has; None where there is none that can be read."""
    try:
        state = json.loads((checkpoint / STATE / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


class Saved(NamedTuple):
    """Place of a checkpoint in the order in which its run folder's checkpoints were saved; compares by that order."""

    number: int  # counts the saves into the folder from 1; 0 where state.json has none, as in those of version 0.1
    time: float  # seconds since 1970, by the clock of the machine that saved it
    step: int


def saved_at(checkpoint: Path) -> Saved:
    """Return when a checkpoint was saved.

    Within a folder the numbers decide, since a clock may be set back; between folders there is the time alone.
    """
    state = state_of(checkpoint) or {}
    number, when = state.get("saves"), state.get("time")
    if not isinstance(when, float):
        with contextlib.suppress(FileNotFoundError):  # another run has deleted it by now
            when = checkpoint.stat().st_mtime
    return Saved(number if isinstance(number, int) else 0, when if isinstance(when, float) else 0.0, _step(checkpoint))


def last_save(folder: Path) -> int:
    """Return the highest number of a save into a run folder; 0 where there is none."""
    return max((saved_at(path).number for path in checkpoints(folder)), default=0)


def newest_first(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the checkpoints of run folders: those of one folder in the order of saving, and folders by time.

    Those whose state.json is lost, and with it their place in the order, come first: whoever checks them names them.
    """
    queues = []
    for folder in folders:
        lost = [path for path in checkpoints(folder) if _has_lost_state(path)]
        yield from reversed(lost)
        queues.append(
            sorted(((saved_at(path), path) for path in checkpoints(folder) if path not in lost), reverse=True)
        )
    while queues := [queue for queue in queues if queue]:
        yield max(queues, key=lambda queue: queue[0][0].time).pop(0)[1]


def _has_lost_state(checkpoint: Path) -> bool:
    """Return whether a checkpoint was saved with a state.json, which cannot be read."""
    try:
        return state_of(checkpoint) is None and f"{STATE}/state.json" in listed(checkpoint)
    except ValueError:
        return True


def best(folder: Path, metric: str, *, greater: bool) -> Path | None:
    """The checkpoint of a run folder that has the best of a metric; None where none has it."""
    found = []
    for path in checkpoints(folder):
        value = ((state_of(path) or {}).get("metrics") or {}).get(metric)
        if isinstance(value, int | float) and math.isfinite(value):
            found.append((value if greater else -value, path))
    return max(found, default=(0, None), key=lambda one: one[0])[1]


def link(folder: Path, name: str, checkpoint: Path) -> None:
    """Make the link `name` in a run folder lead to one of its checkpoints. A file system without links has none."""
    beside = hidden(folder / name)
    with contextlib.suppress(OSError):
        beside.unlink(missing_ok=True)
        beside.symlink_to(checkpoint.name)
        beside.replace(folder / name)
        sync(folder)


def tidy(
    folder: Path, newest: Path, save_total_limit: int | None, metric: str, *, greater: bool, keep: Collection[Path] = ()
) -> None:
    """Have `last` lead to the newest whole checkpoint of a run folder, `best` to that with the best of a metric, and
    delete what is beyond the limit, but for these two and those to `keep`."""
    link(folder, "last", newest)
    leader = best(folder, metric, greater=greater)
    if leader is not None:
        link(folder, "best", leader)
    rotate(folder, save_total_limit, {*keep, newest, *([leader] if leader else [])})


def rotate(folder: str | Path, save_total_limit: int | None, keep: Collection[Path] = ()) -> list[Path]:
    """Delete the oldest checkpoints beyond `save_total_limit` (None: keep all), and return them.

    Merged weights beside a checkpoint go with it, unless an export made them. The newest is never deleted, also where
    an earlier run into this folder has left checkpoints of later steps; nor are those to `keep`, which count.
    """
    if save_total_limit is None:
        return []
    found = sorted(checkpoints(folder), key=saved_at)
    kept = {path.resolve() for path in keep}
    others = [path for path in found[:-1] if path.resolve() not in kept]
    doomed = others[: max(0, len(found) - max(1, save_total_limit))]
    for path in doomed:
        merged = merged_beside(path)
        _delete(*([merged] if merged.is_dir() and not of_export(merged / "args.json") else []), path)
    return doomed


def _delete(*folders: Path) -> None:
    """They are absent at once: deleting many gigabytes takes a while, and may be cut short."""
    for folder in folders:
        folder.rename(hidden(folder))
    for folder in folders:
        shutil.rmtree(hidden(folder), ignore_errors=True)
