"""Features of images and videos on disk: computed once, read by later epochs and runs.

A folder belongs to a tower: its name is a hash of the weights. A file has the features of one medium: its name is a
hash of the decoded patches, so of the medium and of its limits. Files are written under temporary names and renamed, so
that runs may share the cache; a checksum shows a file that a crash has cut off.
"""

import fcntl
import logging
import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from ..machine import process_scope

logger = logging.getLogger(__name__)

MAGIC = b"features"
HEADER = struct.Struct("<8s3I16s")  # MAGIC, levels, tokens, bytes of a token, checksum
LOCK = ".lock"
CHECKED = 256 << 20  # bytes that a process writes between two looks at the cache's size
RESERVE = 2 << 30  # bytes that stay free on the disk, for checkpoints


@dataclass(frozen=True)
class FeatureFiles:
    """Features of one tower in a folder."""

    folder: Path

    def key(self, grid: tuple[int, ...], patches: np.ndarray) -> str:
        """Return the name of a medium's features.

        grid: with the layout of tiles, if there is one
        patches: uint8 [patches, values], or the spectrogram of an audio
        """
        checksum = xxh3_128(repr((grid, patches.shape)).encode())
        checksum.update(np.ascontiguousarray(patches))
        return checksum.hexdigest()

    def read(self, key: str) -> np.ndarray | None:
        """Return the features of a medium: uint8 [levels, tokens, bytes of a token]; None if there are none.

        A damaged file is removed.
        """
        file = self._file(key)
        try:
            with file.open("rb") as stream:
                header, data = stream.read(HEADER.size), np.fromfile(stream, np.uint8)
        except OSError:
            return None
        if (shape := _valid_shape(header, data)) is None:
            logger.warning("%s is damaged, and its features are computed again", file)
            with suppress(OSError):
                file.unlink()
            return None
        with suppress(OSError):
            os.utime(file)  # the time of its last use
        return data.reshape(shape)

    def write(self, key: str, features: np.ndarray) -> None:
        """Write the features of a medium: uint8 [levels, tokens, bytes of a token]. Raises OSError."""
        file, features = self._file(key), np.ascontiguousarray(features)
        temporary = file.with_name(f".{key}-{process_scope()}-{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as stream:
                stream.write(HEADER.pack(MAGIC, *features.shape, xxh3_128(features).digest()))
                stream.write(features)
            temporary.replace(file)
        finally:
            with suppress(OSError):
                temporary.unlink()

    def has(self, key: str) -> bool:
        return self._file(key).exists()

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / key


class CacheBound:
    """Bound of the size of a folder of caches, over all processes, which is exceeded by CHECKED for each at most.

    Files that were last used before this run go first. Those of this run stay: if one were removed for each one
    written, an epoch over more than the bound would find none.
    """

    def __init__(self, root: Path, most_bytes: int):
        self._root, self._most = root, most_bytes
        self._step = min(CHECKED, most_bytes // 16)
        # The kernel's clock for files is some milliseconds behind.
        self._unchecked, self._begin = self._step, time.time() - 1

    def admits(self, size: int) -> bool:
        """Return whether `size` more bytes may be written; removes old files for them."""
        self._unchecked += size
        if self._unchecked < self._step:
            return True
        self._unchecked = 0
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._make_room(max(size, self._step))

    def _make_room(self, size: int) -> bool:
        files = sorted(_files(self._root))
        excess = sum(status.st_size for _, _, status in files) + size - self._most
        excess = max(excess, size + RESERVE - shutil.disk_usage(self._root).free)
        for used, path, status in files:
            if excess <= 0:
                return True
            if used >= self._begin:
                return False
            with suppress(FileNotFoundError):
                os.unlink(path)
            excess -= status.st_size
        return excess <= 0


def _valid_shape(header: bytes, data: np.ndarray) -> tuple[int, int, int] | None:
    if len(header) < HEADER.size:
        return None
    magic, levels, tokens, width, checksum = HEADER.unpack(header)
    is_whole = magic == MAGIC and data.size == levels * tokens * width and xxh3_128(data).digest() == checksum
    return (levels, tokens, width) if is_whole else None


def _files(folder: Path) -> Iterator[tuple[float, str, os.stat_result]]:
    """Yield the time of the last use, the path and the status of each file in a folder of caches."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if name == LOCK:
                continue
            path = os.path.join(parent, name)
            with suppress(FileNotFoundError):
                status = os.stat(path)
                yield status.st_mtime, path, status
