"""Folders that are whole or absent.

One is written into a hidden folder beside its place (`begin`), then hashed, synced and renamed (`commit`): so whoever
finds it by its name, after a crash too, finds all of it.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

from ...templates.machine import is_alive, process_scope
from .console import file_size, timed

WEIGHTS = (".safetensors", ".distcp", ".metadata")  # how the names of their files end
MANIFEST = "manifest.json"
SHARED = ".shared-"  # prefix of files in a run's folder, by which nodes find out whether they share it
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants in <fcntl.h> and <linux/fs.h>
Entry = dict[str, int | str]  # of a manifest: size in bytes, sha256
REPLACED = "-replaced"
PARTIAL = re.compile(r"\.(?P<name>.+)\.partial-(?P<scope>.+)-(?P<pid>\d+)")


def loading(folder: Path, *, by_bar: bool = False) -> AbstractContextManager[None]:
    """Print how much is loaded from a folder of weights, and in the end how long it took.

    by_bar: a library draws a progress bar on a terminal, which says the same.
    """
    if by_bar and sys.stderr.isatty():
        return contextlib.nullcontext()
    sizes = [
        sum(file.stat().st_size for file in folder.glob(pattern) if file.name.endswith(WEIGHTS))
        for pattern in ("*", "**/*")  # the latter for megatron-core's, where a checkpoint's optimizer counts too
    ]
    return timed(f"Loading {file_size(sizes[0] or sizes[1])} of weights from {folder}")


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
    elif not of_export(there / "args.json"):
        why = "by its args.json"
    if why:
        raise ValueError(
            f"--output_dir {destination}: --exist_ok true replaces all of a folder, and this one is not known as an "
            f"earlier export's alone ({why}). Give another, or remove it."
        )


def _name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def of_export(args: Path) -> bool:
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
        remove_leftovers(path.parent, path.name)
        free = shutil.disk_usage(path.parent).free
        if free < needed_bytes:
            raise OSError(errno.ENOSPC, f"{_gib(needed_bytes)} are needed and {_gib(free)} are free")
        temporary = hidden(path)
        temporary.mkdir()
    return temporary


def hidden(path: Path, suffix: str = "") -> Path:
    """A name beside `path` that says which process is at work there (read back by PARTIAL)."""
    return path.with_name(f".{path.name}{suffix}.partial-{process_scope()}-{os.getpid()}")


def remove_leftovers(folder: Path, name: str | None = None, *, ours: bool = False) -> None:
    """Remove what was half-written in `folder` and whose writer is gone; give a folder back that it had set aside.

    One on another host or in another container is judged by the `name` of what was to be made; `ours`: nobody else is
    at work there.
    """
    for entry in folder.iterdir():
        match = PARTIAL.fullmatch(entry.name)
        if match is None:
            continue
        target = match["name"].removesuffix(REPLACED)
        if match["scope"] == process_scope():
            pid = int(match["pid"])
            dead = pid == os.getpid() or not is_alive(pid)
        else:
            dead = target == name
        if (dead or ours) and entry.is_dir() and not entry.is_symlink():
            if target != match["name"] and not (folder / target).exists() and listed(entry) and not damage(entry):
                entry.rename(folder / target)  # its writer died within `_place`
            else:
                shutil.rmtree(entry, ignore_errors=True)
        elif dead or ours:
            entry.unlink(missing_ok=True)


def commit(temporary: Path, path: str | Path) -> Path:
    """Put what `begin` made and others filled in its place: manifest, sync, rename. A `path` that exists is replaced.

    The manifest (`manifest.json`) maps each file to its size in bytes and its sha256.
    """
    path = Path(path).absolute()
    with explained(path):
        _finish(temporary)
        _place(temporary, path)
    return path


def commit_together(
    temporary: Path, paths: Sequence[Path], known: Mapping[Path, Mapping[str, Entry]] = MappingProxyType({})
) -> None:
    """The same for folders that were made inside `temporary`, each by the name that it has among `paths`.

    The first is put in its place when all are finished: the last is there only where all are. `known`: of each, the
    files that are on the disk already, as the manifest has them.
    """
    with explained(paths[-1]):
        for path in paths:
            _finish(temporary / path.name, known.get(path, {}))
        for path in paths:
            _place(temporary / path.name, path)
        temporary.rmdir()


def _finish(folder: Path, known: Mapping[str, Entry] = MappingProxyType({})) -> None:
    """Write the manifest; all of the folder is on the disk when this returns."""
    names = sorted(_name(file, folder) for file in folder.rglob("*") if file.is_file())
    with _pool() as pool:
        entries = dict(pool.map(lambda name: (name, known.get(name) or _sealed(folder / name)), names))
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=2) + "\n")
    sync(folder / MANIFEST)
    for inner in [entry for entry in folder.rglob("*") if entry.is_dir()] + [folder]:
        sync(inner)


def _place(folder: Path, path: Path) -> None:
    replaced = hidden(path, REPLACED)
    if path.exists():
        if _exchange(folder, path):
            folder.rename(replaced)
        else:
            path.rename(replaced)
            folder.rename(path)
    else:
        folder.rename(path)
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one operation, so that neither is ever absent.

    Return False where the C library, the kernel or the file system (NFS) cannot: see renameat2(2), RENAME_EXCHANGE.
    """
    sys.audit("os.rename", first, second, -1, -1)
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0


def _sealed(file: Path) -> Entry:
    sync(file)
    return {"size": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _pool() -> ThreadPoolExecutor:
    """Hashing and fsync let go of the GIL."""
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def listed(path: str | Path) -> dict[str, Entry]:
    """Each file's size and sha256 by the manifest of a committed folder; none where it has no manifest.

    Raises ValueError where that is not one.
    """
    manifest = Path(path) / MANIFEST
    if not manifest.is_file():
        return {}
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return {name: {"size": entry["size"], "sha256": entry["sha256"]} for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{manifest} is not a manifest ({error!r}): copy the folder again") from None


def damage(path: str | Path, *, checksums: bool = False, names: Collection[str] | None = None) -> list[str]:
    """What is wrong with a committed folder, a line a file: missing, of another size, or (`checksums`) of other bytes.

    Empty for a folder that is whole, and for one that has no manifest. `names`: the files to look at, else all.
    """
    path = Path(path)

    def fault(name: str, entry: Entry) -> str | None:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
        if checksums and _sha256(file) != entry["sha256"]:
            return f"{name} has other bytes than were written"
        return None

    entries = {name: entry for name, entry in listed(path).items() if names is None or name in names}
    with _pool() as pool:
        return [found for found in pool.map(fault, entries, entries.values()) if found]


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
