"""Entries of the token cache, keyed by the data and the options that determine the tokens.

An entry is the folder of a `TokenFile`. It is written under a temporary name and renamed, so it is complete or absent.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from xxhash import xxh3_128

from ..machine import is_alive, process_scope
from .dropped_rows import DroppedRows
from .store import CHECKSUM, TokenFile
from .token_format import MEDIA_SCHEMA, SCHEMA

logger = logging.getLogger(__name__)


def open_or_build(
    folder: Path,
    build: Callable[[], Generator[tuple[pa.RecordBatch, DroppedRows]]],
    *,
    rebuild: bool,
    verify: bool = True,
    has_vision: bool = False,
) -> TokenFile:
    """Return the cache entry `folder`, built first if it is absent or damaged, or if `rebuild`.

    verify: check the checksum too, which reads the entire file
    has_vision: whether the batches have the columns of media
    Concurrent runs may build the same entry; the first to finish renames its copy into place.
    Raises OSError with the folder and the fix if the disk is full or cannot be written.
    """
    if folder.exists():
        if not rebuild:
            try:
                return TokenFile(folder, verify=verify)
            except (OSError, ValueError, KeyError, TypeError) as error:  # Arrow's errors are subclasses of these
                logger.warning("the cached tokens in %s are damaged and will be rebuilt: %s", folder, error)
        _remove(folder)
    temporary = folder.with_name(f".{folder.name}-{process_scope()}-{os.getpid()}")
    _remove_leftovers(folder)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        with closing(build()) as batches:  # also ends its worker processes on an error
            _write(temporary, batches, MEDIA_SCHEMA if has_vision else SCHEMA)
        file = TokenFile(temporary)  # before the renaming, because another run may then remove it to rebuild
        try:
            temporary.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another run has built the same entry.
    except OSError as error:
        raise _add_fix(error, folder.parent) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    file.folder = folder
    return file


def _write(folder: Path, batches: Iterable[tuple[pa.RecordBatch, DroppedRows]], schema: pa.Schema) -> None:
    dropped = DroppedRows()
    path = folder / "tokens.arrow"
    with path.open("wb") as stream:
        sink = _ChecksumWriter(stream)
        with pa.PythonFile(sink, "w") as file, pa.ipc.new_file(file, schema) as writer:
            for batch, batch_dropped in batches:
                dropped.merge(batch_dropped)
                if batch.num_rows:
                    writer.write_batch(batch)
    manifest = {"bytes": path.stat().st_size, CHECKSUM: sink.sum.hexdigest(), "refusals": vars(dropped)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class _ChecksumWriter:
    """Sequential writer of a file that computes its checksum."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.sum = stream, xxh3_128()
        self.closed = False

    def write(self, data: bytes) -> int:
        self.sum.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self.closed = True


def _remove_leftovers(folder: Path) -> None:
    """Remove partial copies of this entry that killed runs on this machine left behind."""
    for entry in folder.parent.glob(f".{folder.name}-{process_scope()}-*"):
        if not is_alive(int(entry.name.removesuffix("-old").rpartition("-")[2])):
            shutil.rmtree(entry, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove an entry. It is renamed first, so that a reader finds all of it or nothing, and keeps its mapped pages."""
    old = folder.with_name(f".{folder.name}-{process_scope()}-{os.getpid()}-old")
    with suppress(FileNotFoundError):
        folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _add_fix(error: OSError, folder: Path) -> OSError:
    fix = "set MODELSCOPE_CACHE (or HF_HOME) to a folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OSError(f"no space left for tokens in {folder}. Free some, or {fix} on a larger disk.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return OSError(f"cannot write tokens to {folder} ({error}). S{fix[1:]} that can be written.")
    return error
