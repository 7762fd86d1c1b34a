"""Copies of files whose rows cannot be read one by one, in a form in which they can.

Training reads the row of each sample with images or videos again. Parquet holds rows in large groups, gzip, JSON arrays
and CSV must be read from their start. The copy is made once, in the cache.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..cache import cache_root
from ..machine import process_scope
from .files import Concatenation, File, GzipLineFile, LineFile, ParsedFile, RowSource
from .sources import PresetSource
from .tables import Arrow, Parquet

BATCH_ROWS = 64  # rows of a batch in the copy of a table; one batch is read for a row


def readable_by_row(source: RowSource) -> RowSource:
    """Return a source with the same rows, of which each is read in about the same time."""
    match source:
        case Concatenation():
            return Concatenation(source.name, [readable_by_row(part) for part in source.sources])
        case PresetSource():
            return PresetSource(readable_by_row(source.source), source.preset, source.columns)
        case Parquet():
            return Arrow(_copied(source, ".arrow", _write_table))
        case GzipLineFile() | ParsedFile():
            return LineFile(_copied(source, ".jsonl", _write_lines), json.loads)
    return source


def _copied[F: File](source: F, extension: str, write: Callable[[F, Path], None]) -> Path:
    """Return the copy of a file, made first if it is missing."""
    name = source.fingerprint.replace(".", "-")
    copy = cache_root() / "rows" / f"{name}{extension}"
    if not copy.is_file():
        temporary = copy.with_name(f".{name}-{process_scope()}-{os.getpid()}")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            write(source, temporary)
            temporary.replace(copy)
        finally:
            temporary.unlink(missing_ok=True)
    return copy


def _write_table(source: Parquet, path: Path) -> None:
    source.copy_to_arrow(path, BATCH_ROWS)


def _write_lines(source: File, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for _, _, row in source.rows(np.arange(len(source))):
            file.write(json.dumps(row) + "\n")
