"""Folders on a disk: size, file system, and a plain copy to compare with."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def size_of(files: Iterable[Path]) -> int:
    """Return the bytes of files."""
    return sum(file.stat().st_size for file in files)


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, such as ext4 or tmpfs."""
    answer = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def forget(folder: Path) -> None:
    """Evict the files of a folder from the page cache, so that they are read from the disk."""
    for file in files_of(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copied(folder: Path, destination: Path, limit: float = float("inf")) -> dict[str, float]:
    """Copy files of a folder with `cp`, up to `limit` bytes, and delete the copy.

    Returns the bytes, and the seconds until they were synced to the disk.
    """
    files, size = [], 0
    for file in files_of(folder):
        if files and size + file.stat().st_size > limit:
            continue
        files.append(str(file.relative_to(folder)))
        size += file.stat().st_size
    destination.mkdir(parents=True)
    begin = time.perf_counter()
    subprocess.run(["cp", "--parents", *files, str(destination)], check=True, cwd=folder)
    subprocess.run(["sync", *files], check=True, cwd=destination)
    seconds = time.perf_counter() - begin
    shutil.rmtree(destination)
    return {"bytes": size, "seconds": seconds}


def keep_logs(folder: Path, destination: Path) -> None:
    """Move the logs of a folder to another one, and delete the rest."""
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for log in folder.glob("*.log"):
        shutil.move(log, destination / log.name)
    shutil.rmtree(folder, ignore_errors=True)
