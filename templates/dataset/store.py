"""Tokens on disk: written once, memory-mapped, found again by what made them.

A cache entry is a folder of two files: `tokens.arrow` (an Arrow file, one row per sample) and `manifest.json` (its
size and checksum, and which rows were dropped and why). It is written beside its place and renamed into it: it is whole
or absent.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128

from ..formats.schemas import Stage, UnusableRow
from ..machine import is_alive, process_scope
from ..plural import plural
from .packing import round_up

logger = logging.getLogger(__name__)

CHECKSUM = "xxh3_128"  # key in the manifest: hexadecimal hash of tokens.arrow
BLOCK = 8 * 2**20  # bytes that are read at a time
FORMAT = 6  # part of every cache key: raise it when what is stored changes

SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),  # of all documents of the sample
        "run_lengths": pa.list_(pa.int32()),  # loss weights, run-length encoded
        "run_weights": pa.list_(pa.float32()),
        "document_lengths": pa.list_(pa.int32()),
        "label": pa.list_(pa.float32()),
        "columns": pa.list_(pa.uint8()),  # prompts: the row's other columns, as JSON
        "length": pa.int32(),
        "weight": pa.float64(),  # of the first document: sum of the loss weights but its first token's
        "trained": pa.int32(),  # of it too: tokens of a weight above 0, but for the first, which nothing predicts
        "row": pa.int64(),  # number of the source's row that the sample comes from
    }
)
LISTS = [field.name for field in SCHEMA if pa.types.is_list(field.type)]
NUMBERS = {
    pa.uint8(): np.uint8, pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32, pa.float64(): np.float64
}  # fmt: skip


Runs = list[tuple[int, float]]  # loss weights, run-length encoded: (tokens, weight)

Document = tuple[np.ndarray, np.ndarray]  # token ids [length], loss weights [length]: how much each token is trained on


class Encoded(NamedTuple):
    """A sample: documents that belong together, as (token ids, loss weights), and what is said of them."""

    row: int  # its number
    documents: list[tuple[np.ndarray, Runs]]
    label: list[float]
    columns: bytes = b""


class Group(NamedTuple):
    """A sample as it is laid out."""

    documents: list[Document]
    label: np.ndarray  # float32 [numbers]
    item: int = -1  # its number in the store; -1 in a stream


@dataclass
class Refusals:
    """Rows that were dropped: reason -> how many, where the first few are, and the shortest's and longest's tokens."""

    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)  # of rows that are too long

    def add(self, row: UnusableRow, place: str) -> None:
        reason = str(row)
        tokens = {} if row.tokens is None else {reason: [row.tokens] * 2}
        self.merge(Refusals({reason: 1}, {reason: [place]}, tokens))

    def merge(self, other: "Refusals") -> None:
        for reason, number in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + number
            self.places[reason] = (self.places.get(reason, []) + other.places[reason])[:3]
        for reason, lengths in other.tokens.items():
            lengths = [*self.tokens.get(reason, []), *lengths]
            self.tokens[reason] = [min(lengths), max(lengths)]

    def __str__(self) -> str:
        lines = []
        for reason, number in sorted(self.counts.items(), key=lambda item: -item[1]):
            more = ", ..." if number > len(self.places[reason]) else ""
            said = f": {reason}"
            if reason in self.tokens:
                shortest, longest = self.tokens[reason]
                lengths = f"{longest:,}" if shortest == longest else f"shortest {shortest:,}, longest {longest:,}"
                said = f" {reason} ({lengths} tokens)"
            lines.append(f"  {plural(number, 'row')}{said} ({', '.join(self.places[reason])}{more})")
        return "\n".join(lines)


def record_batch(samples: list[Encoded]) -> pa.RecordBatch:
    """Samples as Arrow."""
    firsts = [sample.documents[0][1] for sample in samples]
    lengths = [[len(ids) for ids, _ in sample.documents] for sample in samples]
    lists = {
        "input_ids": [_joined([ids for ids, _ in sample.documents]) for sample in samples],
        "run_lengths": [[tokens for _, runs in sample.documents for tokens, _ in runs] for sample in samples],
        "run_weights": [[weight for _, runs in sample.documents for _, weight in runs] for sample in samples],
        "document_lengths": lengths,
        "label": [sample.label for sample in samples],
        "columns": [np.frombuffer(sample.columns, np.uint8) for sample in samples],
    }
    numbers = {
        "length": [sum(documents) for documents in lengths],
        "weight": [sum(tokens * weight for tokens, weight in runs) - runs[0][1] for runs in firsts],
        "trained": [sum(tokens for tokens, weight in runs if weight) - (runs[0][1] > 0) for runs in firsts],
        "row": [sample.row for sample in samples],
    }
    columns: list[pa.Array] = [_lists(lists[name], SCHEMA.field(name).type) for name in LISTS]
    columns += [_to_arrow(values, SCHEMA.field(name).type) for name, values in numbers.items()]
    return pa.record_batch(columns, schema=SCHEMA)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


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
    """One cache entry, memory-mapped. Raises OSError, ValueError or KeyError where it is damaged.

    verify: read the whole file, and compare its checksum; an entry of version 0.1 has none.
    """

    def __init__(self, folder: Path, *, verify: bool = False):
        self.folder = folder
        manifest = json.loads((folder / "manifest.json").read_text())
        path = folder / "tokens.arrow"
        if path.stat().st_size != manifest["bytes"]:
            raise ValueError(f"{path} holds {path.stat().st_size} bytes, not {manifest['bytes']}")
        if verify and manifest.get(CHECKSUM, checksum := _checksum(path)) != checksum:
            raise ValueError(f"{path} has other bytes than were written")
        self.refusals = Refusals(**manifest["refusals"])
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._starts = np.cumsum([0] + [batch.num_rows for batch in self._batches])
        self._lists = [tuple(_flat(batch.column(i)) for i in range(len(LISTS))) for batch in self._batches]
        self.lengths = self._column("length").astype(np.int64)
        self.weights = self._column("weight")
        self.trained = self._column("trained")
        self.rows = self._column("row")

    def __reduce__(self):
        return TokenFile, (self.folder,)  # another process maps the same pages

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, i: int) -> list[Document]:
        """Of each document of sample i: token ids [length] int32 and loss weights [length] float32."""
        ids, runs, weights, lengths, *_ = self._row(i)
        weights = np.repeat(weights, runs)
        if len(lengths) == 1:
            return [(ids, weights)]
        ends = np.cumsum(lengths)[:-1]
        return list(zip(np.split(ids, ends), np.split(weights, ends), strict=True))

    def label(self, i: int) -> np.ndarray:
        """float32 [numbers]"""
        return self._row(i)[LISTS.index("label")]

    def columns(self, i: int) -> dict[str, Any]:
        """prompts: the row that sample i comes from."""
        return json.loads(self._row(i)[LISTS.index("columns")].tobytes())

    @cached_property
    def filled(self) -> dict[str, np.ndarray]:
        """prompts: the columns that any row has, each with the samples that have it: bool [samples]. Reads all rows."""
        found: dict[str, np.ndarray] = {}
        sample = 0
        for offsets, values in self._of_all("columns"):
            for start, stop in pairwise(offsets.tolist()):
                for name in json.loads(values[start:stop].tobytes()):
                    found.setdefault(name, np.zeros(len(self), bool))[sample] = True
                sample += 1
        return found

    def padded_lengths(self, multiple: int, beside: bool) -> np.ndarray:
        """As TokenStore.padded_lengths."""
        gather = np.maximum if beside else np.add
        documents = self._of_all("document_lengths")
        padded = [
            gather.reduceat(round_up(lengths.astype(np.int64), multiple), offsets[:-1])
            for offsets, lengths in documents
        ]
        return np.concatenate([np.empty(0, np.int64), *padded])

    def sizes(self, name: str) -> np.ndarray:
        """How many values each sample has in a list column: int32 [samples]."""
        sizes = [np.diff(offsets) for offsets, _ in self._of_all(name)]
        return np.concatenate([np.empty(0, np.int32), *sizes])

    def labels(self, width: int) -> np.ndarray:
        """The first numbers of each label, NaN where it has fewer: float32 [samples, width]."""
        sizes = self.sizes("label")
        values = np.concatenate([np.empty(0, np.float32), *(values for _, values in self._of_all("label"))])
        starts, found = np.cumsum(sizes) - sizes, np.full((len(self), width), np.nan, np.float32)
        for place in range(width):
            found[sizes > place, place] = values[starts[sizes > place] + place]
        return found

    def _row(self, i: int) -> list[np.ndarray]:
        """What sample i has in each list column."""
        batch = int(np.searchsorted(self._starts, i, side="right")) - 1
        at = i - self._starts[batch]
        return [values[offsets[at] : offsets[at + 1]] for offsets, values in self._lists[batch]]

    def _of_all(self, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Offsets and values of a list column, batch by batch."""
        return [lists[LISTS.index(name)] for lists in self._lists]

    def _column(self, name: str) -> np.ndarray:
        columns = [_to_numpy(batch.column(name)) for batch in self._batches]
        return np.concatenate([np.empty(0, NUMBERS[SCHEMA.field(name).type]), *columns])


def _flat(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    return _to_numpy(column.offsets), _to_numpy(column.values)


class TokenStore:
    """Samples of several token files, chosen and ordered by number."""

    def __init__(self, files: list[TokenFile], samples: np.ndarray, stage: Stage, names: list[str] | None = None):
        """`samples` counts through the files one after another; a number may come more than once. `names`: what a user
        calls the source of each file."""
        self.files, self.samples, self._names = files, samples, names or [""] * len(files)
        self.stage: Stage = stage
        self._starts = np.cumsum([0] + [len(file) for file in files])
        self.lengths = self._chosen([file.lengths for file in files])  # int64 [samples]
        self.weights = self._chosen([file.weights for file in files])  # float64 [samples]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def trained_tokens(self) -> int:
        """Tokens of first documents that are trained on, whatever their weight."""
        return int(self._chosen([file.trained for file in self.files]).sum())

    @cached_property
    def document_counts(self) -> np.ndarray:
        """int32 [samples]"""
        return self._chosen([file.sizes("document_lengths") for file in self.files])

    @cached_property
    def label_width(self) -> int:
        """The most numbers that a label has."""
        return int(self._chosen([file.sizes("label") for file in self.files]).max(initial=0))

    @cached_property
    def labels(self) -> np.ndarray:
        """float32 [samples, label_width], NaN where a label has fewer numbers."""
        return self._chosen([file.labels(self.label_width) for file in self.files])

    def padded_lengths(self, multiple: int, beside: bool) -> np.ndarray:
        """Tokens of each sample with its documents rounded up to `multiple`: together or, with `beside`, of the longer:
        int64 [samples]."""
        return self._chosen([file.padded_lengths(multiple, beside) for file in self.files])

    def row(self, i: int) -> list[Document]:
        """Of each document of sample i: token ids [length] int32 and loss weights [length] float32."""
        file, number = self._at(i)
        return self.files[file].row(number)

    def label(self, i: int) -> np.ndarray:
        """float32 [numbers]"""
        file, number = self._at(i)
        return self.files[file].label(number)

    def columns(self, i: int) -> dict[str, Any]:
        """prompts: the row that sample i comes from."""
        file, number = self._at(i)
        return self.files[file].columns(number)

    def has(self, column: str) -> np.ndarray:
        """prompts: whether the row of each sample has something in a column: bool [samples]."""
        return self._chosen([file.filled.get(column, np.zeros(len(file), bool)) for file in self.files])

    def place(self, i: int) -> str:
        """The row that sample i comes from, to name it in a message."""
        file, number = self._at(i)
        return f"row {self.files[file].rows[number] + 1} of {self._names[file]}"

    def _at(self, i: int) -> tuple[int, int]:
        """The number of its file, and its number in it."""
        sample = self.samples[i]
        file = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return file, int(sample - self._starts[file])

    def _chosen(self, columns: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(columns)[self.samples]


def cache_root() -> Path:
    """Where tokens are kept: shared by nodes where the user's hub cache is."""
    if root := os.environ.get("MODELSCOPE_CACHE") or os.environ.get("HF_HOME"):
        return Path(root).expanduser() / "megaswift"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "megaswift"


def open_or_build(
    folder: Path,
    build: Callable[[], Generator[tuple[pa.RecordBatch, Refusals]]],
    *,
    rebuild: bool,
    verify: bool = True,
) -> TokenFile:
    """The cache entry `folder`, built first where it is absent, damaged or not wanted as it is.

    verify: damage is looked for by the checksum too, which reads the whole file.
    Runs that build the same entry at once do not disturb each other: the first to finish gives the entry its name.
    Raises OSError, naming the folder and the cure, where the disk is full or cannot be written.
    """
    if folder.exists():
        if not rebuild:
            try:
                return TokenFile(folder, verify=verify)
            except (OSError, ValueError, KeyError, TypeError) as error:  # Arrow's own errors are among these
                logger.warning("the cached tokens in %s are damaged and are made anew: %s", folder, error)
        _remove(folder)
    beside = folder.with_name(f".{folder.name}-{process_scope()}-{os.getpid()}")
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
    with path.open("wb") as stream:
        sink = _Summed(stream)
        with pa.PythonFile(sink, "w") as file, pa.ipc.new_file(file, SCHEMA) as writer:
            for batch, refused in batches:
                refusals.merge(refused)
                if batch.num_rows:
                    writer.write_batch(batch)
    manifest = {"bytes": path.stat().st_size, CHECKSUM: sink.sum.hexdigest(), "refusals": vars(refusals)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class _Summed:
    """File that is written from its beginning to its end, with a checksum of what was written."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.sum = stream, xxh3_128()
        self.closed = False

    def write(self, data: Any) -> int:
        self.sum.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self.closed = True


def _checksum(path: Path) -> str:
    total = xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            total.update(block)
    return total.hexdigest()


def _remove_leftovers(folder: Path) -> None:
    """What runs that were killed on this machine have left of this entry."""
    for entry in folder.parent.glob(f".{folder.name}-{process_scope()}-*"):
        if not is_alive(int(entry.name.removesuffix("-old").rpartition("-")[2])):
            shutil.rmtree(entry, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Take the name away first: a reader sees a whole entry or none, and keeps the pages that it has mapped."""
    old = folder.with_name(f".{folder.name}-{process_scope()}-{os.getpid()}-old")
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
