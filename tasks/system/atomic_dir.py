"""Folders written atomically: complete or absent.

A folder is written under a hidden name beside its final one (`stage`), then hashed, synced and renamed (`commit`).
A folder with the final name is therefore complete, even after a crash.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

from ...templates.machine import is_alive, process_scope
from .console import file_size, timed

WEIGHTS = (".safetensors", ".distcp", ".metadata")  # suffixes of weight files
MANIFEST = "manifest.json"
SHARED = ".shared-"  # prefix of files in a run's folder that show whether the nodes share it
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants in <fcntl.h> and <linux/fs.h>
ManifestEntry = dict[str, int | str]  # size in bytes, sha256
REPLACED = "-replaced"
PARTIAL = re.compile(r"\.(?P<name>.+)\.partial-(?P<scope>.+)-(?P<pid>\d+)")


def loading(folder: Path, *, has_progress_bar: bool = False) -> AbstractContextManager[Callable[[float], None]]:
    """Print the size of the weights in a folder while they are loaded, then the seconds it took.

    has_progress_bar: a library draws its own progress bar on a terminal, so nothing is printed there.
    The context's function takes the share that is loaded, for a terminal.
    """
    if has_progress_bar and sys.stderr.isatty():
        return contextlib.nullcontext(lambda share: None)
    sizes = [
        sum(file.stat().st_size for file in folder.glob(pattern) if file.name.endswith(WEIGHTS))
        for pattern in ("*", "**/*")  # the second for megatron-core's format, including a checkpoint's optimizer state
    ]
    return timed(f"Loading {file_size(sizes[0] or sizes[1])} of weights from {folder}")


def check_free(destination: Path, source: Path, *, exist_ok: bool) -> None:
    """Raise ValueError where writing the folder `destination` is impossible or would harm existing files."""
    target, origin = destination.resolve(), source.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise ValueError(
            f"--output_dir {destination}: it is, contains or lies within the folder to export. Set another one."
        )
    try:
        exists = target.exists()
    except OSError as error:  # the name is too long, or its parent cannot be read
        raise ValueError(f"--output_dir {destination}: {error.strerror}. Set another one.") from None
    if exists and not target.is_dir():
        raise ValueError(f"--output_dir {destination}: it is a file. Set a folder to be made.")
    if target.is_mount():
        raise ValueError(f"--output_dir {destination}: it is a mount point. Set a folder within it.")
    if not exists or not any(target.iterdir()):
        return
    if not exist_ok:
        raise ValueError(f"--output_dir {destination}: it exists. Set another one, or --exist_ok true to replace it.")
    names = {_relative_name(file, target) for file in target.rglob("*") if not file.is_dir()}
    foreign_files = sorted(names - read_manifest(target).keys() - {MANIFEST})
    reason = f"{', '.join(foreign_files[:3])} are not in its manifest" if foreign_files else ""
    if not (target / MANIFEST).is_file():
        reason = f"it has no {MANIFEST}"
    elif not is_export(target / "args.json"):
        reason = "its args.json is no export's"
    if reason:
        raise ValueError(
            f"--output_dir {destination}: --exist_ok true replaces only folders of earlier exports, and this one is "
            f"none ({reason}). Set another one, or remove it."
        )


def _relative_name(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def is_export(args: Path) -> bool:
    """Return whether an args.json has the options of an export."""
    try:
        return "to_mcore" in json.loads(args.read_text(encoding="utf-8"))["options"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def stage(path: str | Path, *, needed_bytes: int = 0) -> Path:
    """Create an empty hidden folder beside `path` and return it; `commit` renames it to `path`.

    Removes leftovers of dead processes from the parent folder. Raises OSError where the folder cannot be written, or
    where fewer than `needed_bytes` are free.
    """
    path = Path(path).absolute()
    with os_error_hints(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, path.name)
        free = shutil.disk_usage(path.parent).free
        if free < needed_bytes:
            raise OSError(errno.ENOSPC, f"{_gib(needed_bytes)} are needed, {_gib(free)} are free")
        temporary = hidden_path(path)
        temporary.mkdir()
    return temporary


def hidden_path(path: Path, suffix: str = "") -> Path:
    """Return a hidden name beside `path` that identifies this process (parsed by PARTIAL)."""
    return path.with_name(f".{path.name}{suffix}.partial-{process_scope()}-{os.getpid()}")


def remove_leftovers(folder: Path, name: str | None = None, *, is_locked: bool = False) -> None:
    """Remove half-written entries of `folder` whose process has ended; restore a folder that it was replacing.

    Entries of another host or container are removed if they belong to `name`. `is_locked`: no other process uses
    `folder`, so all entries are removed.
    """
    for entry in folder.iterdir():
        match = PARTIAL.fullmatch(entry.name)
        if match is None:
            continue
        target = match["name"].removesuffix(REPLACED)
        if match["scope"] == process_scope():
            pid = int(match["pid"])
            is_dead = pid == os.getpid() or not is_alive(pid)
        else:
            is_dead = target == name
        if (is_dead or is_locked) and entry.is_dir() and not entry.is_symlink():
            if (
                target != match["name"]
                and not (folder / target).exists()
                and read_manifest(entry)
                and not verify_files(entry)
            ):
                entry.rename(folder / target)  # its process ended within `_rename`
            else:
                shutil.rmtree(entry, ignore_errors=True)
        elif is_dead or is_locked:
            entry.unlink(missing_ok=True)


def commit(temporary: Path, path: str | Path) -> Path:
    """Write the manifest of a staged folder, sync it, and rename it to `path`, replacing an existing folder.

    The manifest (`manifest.json`) maps each file to its size in bytes and its sha256.
    """
    path = Path(path).absolute()
    with os_error_hints(path):
        _write_manifest(temporary)
        _rename(temporary, path)
    return path


def commit_together(
    temporary: Path, paths: Sequence[Path], synced: Mapping[Path, Mapping[str, ManifestEntry]] = MappingProxyType({})
) -> None:
    """Commit several folders inside `temporary`, each under its name in `paths`.

    None is renamed before all are complete, so that the last one exists only if all do. `synced`: manifest entries of
    files that are already synced, by folder.
    """
    with os_error_hints(paths[-1]):
        for path in paths:
            _write_manifest(temporary / path.name, synced.get(path, {}))
        for path in paths:
            _rename(temporary / path.name, path)
        temporary.rmdir()


def _write_manifest(folder: Path, synced: Mapping[str, ManifestEntry] = MappingProxyType({})) -> None:
    """Write the manifest, and sync the folder with all its files to the disk."""
    names = sorted(_relative_name(file, folder) for file in folder.rglob("*") if file.is_file())
    with _pool() as pool:
        entries = dict(pool.map(lambda name: (name, synced.get(name) or _sync_and_hash(folder / name)), names))
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=2) + "\n")
    sync(folder / MANIFEST)
    for subfolder in [entry for entry in folder.rglob("*") if entry.is_dir()] + [folder]:
        sync(subfolder)


def _rename(folder: Path, path: Path) -> None:
    replaced = hidden_path(path, REPLACED)
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
    """Exchange the names of two folders atomically, so that neither is ever absent.

    Returns False where the C library, the kernel or the file system (NFS) does not support it: see renameat2(2),
    RENAME_EXCHANGE.
    """
    sys.audit("os.rename", first, second, -1, -1)
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0


def _sync_and_hash(file: Path) -> ManifestEntry:
    sync(file)
    return {"size": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _pool() -> ThreadPoolExecutor:
    """Return a thread pool for hashing and fsync, which release the GIL."""
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(path: str | Path) -> dict[str, ManifestEntry]:
    """Return each file's size and sha256 from the manifest of a committed folder; {} without a manifest.

    Raises ValueError for an invalid manifest.
    """
    manifest = Path(path) / MANIFEST
    if not manifest.is_file():
        return {}
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return {name: {"size": entry["size"], "sha256": entry["sha256"]} for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{manifest} is not a manifest ({error!r}). Copy the folder again") from None


def verify_files(path: str | Path, *, checksums: bool = False, names: Collection[str] | None = None) -> list[str]:
    """Return a line for each file of a committed folder that is missing, has another size or (`checksums`) changed.

    The list is empty for a complete folder, and for one without a manifest. `names`: files to check, else all.
    """
    path = Path(path)

    def fault(name: str, entry: ManifestEntry) -> str | None:
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
        if checksums and _sha256(file) != entry["sha256"]:
            return f"{name} has other bytes than were written"
        return None

    entries = {name: entry for name, entry in read_manifest(path).items() if names is None or name in names}
    with _pool() as pool:
        return [line for line in pool.map(fault, entries, entries.values()) if line]


class FolderError(OSError):
    """Write error with its path, reason and fix; its text has no `[Errno ...]` prefix."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.contextmanager
def os_error_hints(path: Path) -> Iterator[None]:
    """Add a fix to operating system errors on writing below `path`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FolderError):  # an inner context has added hints
            raise
        if error.filename and not _is_related(Path(error.filename), path):  # reading a source failed
            raise
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "Free some space there, keep fewer checkpoints (--save_total_limit)," if is_full else "Make it writable,"
        problem = "The disk is full" if is_full else "The folder cannot be written"
        reason = error.strerror or str(error)
        raise FolderError(error.errno, f"{problem}: {path}: {reason}. {fix} or set another --output_dir.") from error


def _is_related(file: Path, path: Path) -> bool:
    """Return whether a file is `path`, below it, one of its parents, or in a hidden folder beside it."""
    is_beside = any(part.startswith(f".{path.name}") for part in file.parts)
    return is_beside or path in (file, *file.parents) or file in path.parents


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
