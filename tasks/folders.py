"""Folders that a run writes: `<output_dir>/v0-20260131-235959/checkpoint-500/`, each checkpoint whole or absent.

A checkpoint is written into a hidden folder beside its place (`begin`), then hashed, synced and renamed (`commit`): so
whoever finds a folder named checkpoint-N, after a crash too, finds all of it.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WEIGHTS = (".safetensors", ".distcp", ".metadata")  # how the names of their files end
MANIFEST = "manifest.json"
VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
PARTIAL = re.compile(r"\.(?P<name>.+)\.partial-(?P<host>.+)-(?P<pid>\d+)")


def default_output_dir(model: str) -> Path:
    """Where a run goes when `--output_dir` is not given: `megatron_output/<the model's own name>`."""
    return Path("megatron_output") / (Path(model).resolve().name if Path(model).exists() else model.rsplit("/", 1)[-1])


def new_run_folder(output_dir: str | Path, *, add_version: bool = True) -> Path:
    """Make `<output_dir>/v{N}-YYYYMMDD-HHMMSS/`, or `output_dir` itself where `add_version` is false, and return it.

    To be called by one process of a run. Two runs that start in the same second get different folders.
    Raises OSError, with the cure, where the folder cannot be written.
    """
    output_dir = Path(output_dir).expanduser().absolute()
    with explained(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        folder = _new_version(output_dir) if add_version else output_dir
        probe = (
            folder / f".probe-{os.getpid()}"
        )  # mkdir tells nothing of a folder that was there, or of a mount gone read-only
        probe.touch()
        probe.unlink()
    return folder


def _new_version(output_dir: Path) -> Path:
    taken = [int(match[1]) for entry in output_dir.iterdir() if (match := VERSION.fullmatch(entry.name))]
    version = max(taken, default=-1) + 1
    while True:
        folder = output_dir / f"v{version}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            folder.mkdir()  # is the lock: exactly one of two runs makes it
            return folder
        except FileExistsError:
            version += 1


def check_free(destination: Path, source: Path, *, exist_ok: bool) -> None:
    """Raise ValueError where making the folder `destination` of `source` would harm what is there, or cannot be."""
    there, origin = destination.resolve(), source.resolve()
    if there == origin or origin in there.parents or there in origin.parents:
        raise ValueError(f"--output_dir {destination}: is, is in or has in it what is to be exported. Give another.")
    try:
        exists = there.exists()
    except OSError as error:  # the name is too long, or what it lies in may not be looked into
        raise ValueError(f"--output_dir {destination}: {error.strerror}. Give another.") from None
    if exists and not there.is_dir():
        raise ValueError(f"--output_dir {destination}: is a file. Give a folder that is to be made.")
    if there.is_mount():
        raise ValueError(f"--output_dir {destination}: another disk begins there. Give a folder within it.")
    if not exists or not any(there.iterdir()):
        return
    if not exist_ok:
        raise ValueError(
            f"--output_dir {destination}: is there already. Give another, or --exist_ok true to replace it."
        )
    names = {_name(file, there) for file in there.rglob("*") if not file.is_dir()}
    others = sorted(names - listed(there).keys() - {MANIFEST})
    why = f"{', '.join(others[:3])} came otherwise" if others else ""
    if not (there / MANIFEST).is_file():
        why = f"it has no {MANIFEST}"
    elif not _of_export(there / "args.json"):
        why = "by its args.json"
    if why:
        raise ValueError(
            f"--output_dir {destination}: --exist_ok true replaces all of a folder, and this one is not known as an "
            f"earlier export's alone ({why}). Give another, or remove it."
        )


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _of_export(args: Path) -> bool:
    """Whether a folder's args.json has the options of an export."""
    try:
        return "to_mcore" in json.loads(args.read_text(encoding="utf-8"))["options"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def begin(path: str | Path, *, needed_bytes: int = 0) -> Path:
    """Make the empty folder in which `path` is to be written, beside it, and return it; `commit` puts it in its place.

    What dead processes left half-written in the same folder is removed. Raises OSError where the folder cannot be
    written, or where fewer than `needed_bytes` are free.
    """
    path = Path(path).absolute()
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        free = shutil.disk_usage(path.parent).free
        if free < needed_bytes:
            raise OSError(errno.ENOSPC, f"{_gib(needed_bytes)} are needed and {_gib(free)} are free")
        temporary = _hidden(path)
        temporary.mkdir()
    return temporary


def _hidden(path: Path, suffix: str = "") -> Path:
    """A name beside `path` that says which process is at work there (read back by PARTIAL)."""
    return path.with_name(f".{path.name}{suffix}.partial-{socket.gethostname()}-{os.getpid()}")


def _remove_leftovers(path: Path) -> None:
    """Remove the half-written folders whose writer is gone. One on another host is judged by its name alone."""
    for entry in path.parent.iterdir():
        match = PARTIAL.fullmatch(entry.name)
        if match is None:
            continue
        if match["host"] == socket.gethostname():
            pid = int(match["pid"])
            dead = pid == os.getpid() or not _alive(pid)
        else:
            dead = match["name"] == path.name
        if dead:
            shutil.rmtree(entry, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def commit(temporary: Path, path: str | Path) -> Path:
    """Put what `begin` made and others filled in its place: manifest, sync, rename. A `path` that exists is replaced.

    The manifest (`manifest.json`) maps each file to its size in bytes and its sha256.
    """
    path = Path(path).absolute()
    with explained(path):
        _finish(temporary)
        _place(temporary, path)
    return path


def commit_together(temporary: Path, paths: Sequence[Path]) -> None:
    """The same for folders that were made inside `temporary`, each by the name that it has among `paths`.

    The first is put in its place when all are finished: the last is there only where all are.
    """
    with explained(paths[-1]):
        for path in paths:
            _finish(temporary / path.name)
        for path in paths:
            _place(temporary / path.name, path)
        temporary.rmdir()


def _finish(folder: Path) -> None:
    """Write the manifest; all of the folder is on the disk when this returns."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # hashing and fsync let go of the GIL
        entries = dict(pool.map(lambda file: (_name(file, folder), _seal(file)), files))
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=2) + "\n")
    _sync(folder / MANIFEST)
    for inner in [entry for entry in folder.rglob("*") if entry.is_dir()] + [folder]:
        _sync(inner)


def _place(folder: Path, path: Path) -> None:
    replaced = _hidden(path, "-replaced")
    if path.exists():
        path.rename(replaced)
    folder.rename(path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _seal(file: Path) -> dict[str, int | str]:
    _sync(file)
    with file.open("rb") as stream:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def listed(path: str | Path) -> dict[str, dict[str, int | str]]:
    """Each file's size and sha256 by the manifest of a committed folder; none where it has no manifest.

    Raises ValueError where that is not one.
    """
    manifest = Path(path) / MANIFEST
    if not manifest.is_file():
        return {}
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return {name: {"size": entry["size"], "sha256": entry["sha256"]} for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{manifest} is not a manifest ({error!r}): copy the folder again") from None


def damage(path: str | Path, *, checksums: bool = False, names: Collection[str] | None = None) -> list[str]:
    """What is wrong with a committed folder, a line a file: missing, of another size, or (`checksums`) of other bytes.

    Empty for a folder that is whole, and for one that has no manifest. `names`: the files to look at, else all.
    """
    path = Path(path)
    found = []
    for name, entry in listed(path).items():
        if names is not None and name not in names:
            continue
        file = path / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != entry["size"]:
            found.append(f"{name} has {file.stat().st_size} bytes instead of {entry['size']}")
        elif checksums and _seal(file)["sha256"] != entry["sha256"]:
            found.append(f"{name} has other bytes than were written")
    return found


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints of a run folder, oldest step first."""
    entries = [
        (int(match[1]), entry) for entry in Path(folder).iterdir() if (match := CHECKPOINT.fullmatch(entry.name))
    ]
    return [entry for _, entry in sorted(entries)]


def merged_beside(checkpoint: Path) -> Path:
    """Where the merged weights of an adapter's checkpoint are."""
    return checkpoint.with_name(f"{checkpoint.name}-merged")


def rotate(folder: str | Path, save_total_limit: int | None) -> list[Path]:
    """Delete the oldest checkpoints beyond `save_total_limit` (None: keep all), and return them.

    Merged weights beside a checkpoint go with it, unless an export made them. The newest is never deleted, also where
    an earlier run into this folder has left checkpoints of later steps.
    """
    if save_total_limit is None:
        return []
    found = sorted(checkpoints(folder), key=lambda path: path.stat().st_mtime_ns)
    doomed = found[: max(0, len(found) - max(1, save_total_limit))]
    for path in doomed:
        merged = merged_beside(path)
        going = [path, merged] if merged.is_dir() and not _of_export(merged / "args.json") else [path]
        for each in going:
            each.rename(_hidden(each))  # absent at once: deleting many gigabytes takes a while
        for each in going:
            shutil.rmtree(_hidden(each), ignore_errors=True)
    return doomed


class FolderError(OSError):
    """What could not be written, why, and what to do; its text has no `[Errno ...]` before it."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an operating system's error on writing below `path` into one that says what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FolderError):  # explained already, further within
            raise
        if error.filename and not _is_of(Path(error.filename), path):  # a source's, which cannot be read
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "Free some space there, keep fewer checkpoints (--save_total_limit)," if full else "Make it writable,"
        problem = "The disk is full" if full else "The folder cannot be written"
        reason = error.strerror or str(error)
        raise FolderError(error.errno, f"{problem}: {path}: {reason}. {cure} or give another --output_dir.") from error


def _is_of(file: Path, path: Path) -> bool:
    """Whether a file lies below `path`, above it, or in what is hidden beside it."""
    beside = any(part.startswith(f".{path.name}") for part in file.parts)
    return beside or path in (file, *file.parents) or file in path.parents


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
