"""Tokens on disk: written once, memory-mapped, found again by what made them.

A cache entry is a folder of two files: `tokens.arrow` (an Arrow file, one row per document) and `manifest.json` (its
size, and which rows were left out and why). It is written beside its place and renamed into it: it is whole or absent.
"""

import errno
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

logger = logging.getLogger(__name__)

FORMAT = 1  # part of every cache key: raise it when what is stored changes

SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "run_lengths": pa.list_(pa.int32()),  # loss weights, run-length encoded
        "run_weights": pa.list_(pa.float32()),
        "length": pa.int32(),
        "weight": pa.float64(),  # sum of the loss weights but the first token's, which nothing predicts
        "trained": pa.int32(),  # tokens of a weight above 0, the first token likewise left out
        "row": pa.int64(),  # number of the source's row that the document comes from
    }
)
NUMBERS = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32, pa.float64(): np.float64}


@dataclass
class Refusals:
    """Rows that were left out: reason -> how many, and where the first few are."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        self.merge(Refusals({reason: 1}, {reason: [place]}))

    def merge(self, other: "Refusals") -> None:
        for reason, number in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + number
            self.places[reason] = (self.places.get(reason, []) + other.places[reason])[:3]

    def __str__(self) -> str:
        lines = []
        for reason, number in sorted(self.counts.items(), key=lambda item: -item[1]):
            more = ", ..." if number > len(self.places[reason]) else ""
            lines.append(f"  {number:,} x {reason} ({', '.join(self.places[reason])}{more})")
        return "\n".join(lines)


def record_batch(documents: Iterable[tuple[int, np.ndarray, list[tuple[int, float]]]]) -> pa.RecordBatch:
    """Documents (row, token ids, runs of loss weights as (tokens, weight)) as Arrow."""
    rows, ids, runs = zip(*documents, strict=True) if (documents := list(documents)) else ((), (), ())
    lengths = [[tokens for tokens, _ in r] for r in runs]
    weights = [[weight for _, weight in r] for r in runs]
    weights_sum = [sum(tokens * weight for tokens, weight in r) - r[0][1] for r in runs]
    trained = [sum(tokens for tokens, weight in r if weight) - (r[0][1] > 0) for r in runs]
    lists = {"input_ids": ids, "run_lengths": lengths, "run_weights": weights}
    numbers = {"length": [len(i) for i in ids], "weight": weights_sum, "trained": trained, "row": rows}
    columns: list[pa.Array] = [_lists(values, SCHEMA.field(name).type) for name, values in lists.items()]
    columns += [_to_arrow(values, SCHEMA.field(name).type) for name, values in numbers.items()]
    return pa.record_batch(columns, schema=SCHEMA)


def _lists(lists: Sequence[Sequence], kind: pa.ListType) -> pa.ListArray:
    offsets = np.cumsum([0] + [len(values) for values in lists], dtype=np.int32)
    dtype = NUMBERS[kind.value_type]
    values = _to_arrow(np.concatenate([np.empty(0, dtype), *lists], dtype=dtype), kind.value_type)
    return pa.ListArray.from_buffers(kind, len(lists), [None, pa.py_buffer(offsets)], children=[values])


# pyarrow's own ways from NumPy and back import pandas, which takes longer than all else here.
def _to_arrow(values: Sequence | np.ndarray, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.asarray(values, NUMBERS[kind]))])


def _to_numpy(values: pa.Array) -> np.ndarray:
    """A view."""
    start, dtype = values.offset, NUMBERS[values.type]
    return np.frombuffer(values.buffers()[1] or b"", dtype)[start : start + len(values)]


class TokenFile:
    """One cache entry, memory-mapped. Raises OSError, ValueError or KeyError where it is damaged."""

    def __init__(self, folder: Path):
        self.folder = folder
        manifest = json.loads((folder / "manifest.json").read_text())
        path = folder / "tokens.arrow"
        if path.stat().st_size != manifest["bytes"]:
            raise ValueError(f"{path} holds {path.stat().st_size} bytes, not {manifest['bytes']}")
        self.refusals = Refusals(**manifest["refusals"])
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._starts = np.cumsum([0] + [batch.num_rows for batch in self._batches])
        self._lists = [tuple(_flat(batch.column(i)) for i in range(3)) for batch in self._batches]
        self.lengths = self._column("length").astype(np.int64)
        self.weights = self._column("weight")
        self.trained = self._column("trained")
        self.rows = self._column("row")

    def __reduce__(self):
        return TokenFile, (self.folder,)  # another process maps the same pages

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [length] int32 and loss weights [length] float32 of document i."""
        batch = int(np.searchsorted(self._starts, i, side="right")) - 1
        at = i - self._starts[batch]
        ids, runs, weights = (values[offsets[at] : offsets[at + 1]] for offsets, values in self._lists[batch])
        return ids, np.repeat(weights, runs)

    def _column(self, name: str) -> np.ndarray:
        columns = [_to_numpy(batch.column(name)) for batch in self._batches]
        return np.concatenate([np.empty(0, NUMBERS[SCHEMA.field(name).type]), *columns])


def _flat(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    return _to_numpy(column.offsets), _to_numpy(column.values)


class TokenStore:
    """Documents of several token files, chosen and ordered by number."""

    def __init__(self, files: list[TokenFile], documents: np.ndarray):
        """`documents` counts through the files one after another; a number may come more than once."""
        self.files, self.documents = files, documents
        self._starts = np.cumsum([0] + [len(file) for file in files])
        self.lengths = np.concatenate([file.lengths for file in files])[documents]  # int64 [documents]
        self.weights = np.concatenate([file.weights for file in files])[documents]  # float64 [documents]

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def trained_tokens(self) -> int:
        """Tokens that are trained on, whatever their weight."""
        return int(np.concatenate([file.trained for file in self.files])[self.documents].sum())

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [length] int32 and loss weights [length] float32 of document i."""
        document = self.documents[i]
        file = int(np.searchsorted(self._starts, document, side="right")) - 1
        return self.files[file].document(int(document - self._starts[file]))


def cache_root() -> Path:
    """Where tokens are kept: shared by nodes where the user's hub cache is."""
    if root := os.environ.get("MODELSCOPE_CACHE") or os.environ.get("HF_HOME"):
        return Path(root).expanduser() / "megaswift"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "megaswift"


def open_or_build(
    folder: Path, build: Callable[[], Generator[tuple[pa.RecordBatch, Refusals]]], *, rebuild: bool
) -> TokenFile:
    """The cache entry `folder`, built first where it is absent, damaged or not wanted as it is.

    Runs that build the same entry at once do not disturb each other: the first to finish gives the entry its name.
    Raises OSError, naming the folder and the cure, where the disk is full or cannot be written.
    """
    if folder.exists():
        if not rebuild:
            try:
                return TokenFile(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:  # Arrow's own errors are among these
                logger.warning("the cached tokens in %s are damaged and are made anew: %s", folder, error)
        _remove(folder)
    beside = folder.with_name(f".{folder.name}-{socket.gethostname()}-{os.getpid()}")
    _remove_leftovers(folder)
    try:
        beside.mkdir(parents=True, exist_ok=True)
        with closing(build()) as batches:  # on an error too, at once: it may have processes at work
            _write(beside, batches)
        file = TokenFile(beside)  # before the name is public: another run may take it away at once, to rebuild
        try:
            beside.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another run was first with the same tokens.
    except OSError as error:
        raise _with_cure(error, folder.parent) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    file.folder = folder
    return file


def _write(folder: Path, batches: Iterable[tuple[pa.RecordBatch, Refusals]]) -> None:
    refusals = Refusals()
    path = folder / "tokens.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for batch, refused in batches:
            refusals.merge(refused)
            if batch.num_rows:
                writer.write_batch(batch)
    manifest = {"bytes": path.stat().st_size, "refusals": vars(refusals)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _remove_leftovers(folder: Path) -> None:
    """What runs that were killed on this machine have left of this entry."""
    for entry in folder.parent.glob(f".{folder.name}-{socket.gethostname()}-*"):
        try:
            os.kill(int(entry.name.removesuffix("-old").rpartition("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(entry, ignore_errors=True)
        except PermissionError:  # it is somebody else's, and alive
            pass


def _remove(folder: Path) -> None:
    """Take the name away first: a reader sees a whole entry or none, and keeps the pages that it has mapped."""
    old = folder.with_name(f".{folder.name}-{socket.gethostname()}-{os.getpid()}-old")
    with suppress(FileNotFoundError):
        folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _with_cure(error: OSError, folder: Path) -> OSError:
    elsewhere = "set MODELSCOPE_CACHE (or HF_HOME) to a folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OSError(f"no space left for tokens in {folder}: free some, or {elsewhere} on a larger disk")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return OSError(f"cannot write tokens to {folder}: {elsewhere} that can be written ({error})")
    return error
