"""Where rows come from, behind one small interface, and the kinds of files that they are in.

A source knows its number of rows and a fingerprint of its content, gives rows by number, and runs through all of them
once for streaming. Fingerprints and row counts of files are kept beside the token cache, so that a large file is read
for them once only.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import re
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..formats.dataset_names import extension
from ..formats.schemas import ArrowRow, kind_of
from ..machine import process_scope
from ..plural import plural
from .store import cache_root
from .tokenize import Row

SPACE = np.frombuffer(b" \t\r\x0b\x0c", np.uint8)  # with which a blank line may begin
BLOCK = 1 << 26  # bytes of a file to look at at a time
AT_A_TIME = 1000  # rows of a stream that are Python objects at a time: a batch may be as large as its file
DEPTH = 900  # levels of JSON: Python's parser refuses about 1000


class Source(ABC):
    """A dataset. Reading raises ValueError, naming the file and the line, where it is broken."""

    name: str

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        """The rows of these numbers, which are sorted."""

    @abstractmethod
    def stream(self, share: int = 0, shares: int = 1, start: int = 0) -> Iterator[Row]:
        """Every `shares`-th row from number `share` on, in order, but for the first `start` of these.

        With as little work on all others as can be.
        """


class File(Source):
    """A file on disk."""

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        stat = self.path.stat()
        # Copies may keep the time of the last change (cp -p, rsync): when the file became what it is, ctime says.
        about = f"{self.path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        key = hashlib.blake2b(about.encode(), digest_size=16)
        memo = cache_root() / "files" / f"{key.hexdigest()}.json"
        with suppress(OSError, ValueError):
            return json.loads(memo.read_text())
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        facts = {"fingerprint": digest.hexdigest() + extension(self.path), "rows": self.count()}
        # A file that has just been written may change again within the clock's tick.
        if time.time_ns() - stat.st_ctime_ns > 2e9:
            with suppress(OSError):
                memo.parent.mkdir(parents=True, exist_ok=True)
                beside = memo.with_suffix(f".{process_scope()}-{os.getpid()}")
                beside.write_text(json.dumps(facts))
                beside.rename(memo)
        return facts

    @property
    def fingerprint(self) -> str:
        return self._facts["fingerprint"]

    def __len__(self) -> int:
        return self._facts["rows"]

    @abstractmethod
    def count(self) -> int: ...

    @abstractmethod
    def stream(self, share: int = 0, shares: int = 1, start: int = 0) -> Generator[Row, None, int]:
        """As above. Returns how many rows the share has, with those that were skipped."""

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The bytes of the file, decompressed where its name ends in .gz."""
        if not extension(self.path).endswith(".gz"):
            with self.path.open("rb") as file:
                yield file
            return
        try:
            with gzip.open(self.path, "rb") as file:
                yield file  # type: ignore[misc]
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{self.name} is not a whole gzip file: {error}") from error


class Parsed(File):
    """A file that is read as a whole: `parse` gives its rows, in order, as (line to name, columns)."""

    def count(self) -> int:
        return len(self._all)

    @abstractmethod
    def parse(self) -> Iterator[tuple[int, dict[str, Any]]]: ...

    @cached_property
    def _all(self) -> list[tuple[int, dict[str, Any]]]:
        return list(self.parse())

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for number in numbers.tolist():
            line, row = self._all[number]
            yield number, f"{self.name} line {line}", row

    def stream(self, share: int = 0, shares: int = 1, start: int = 0) -> Generator[Row, None, int]:
        number = -1
        for number, (line, row) in enumerate(self.parse()):
            if number % shares == share and number >= start * shares:
                yield number, f"{self.name} line {line}", row
        return _of_share(number + 1, share, shares)


class Lines(File):
    """One row in each line that is not blank: JSON, or plain text."""

    def __init__(self, path: Path, read: Callable[[str], dict[str, Any]]):
        super().__init__(path)
        self.read = read

    @cached_property
    def _index(self) -> np.ndarray:
        """Of each line that is not blank: where it starts, where it ends, its number from 1. [rows, 3]"""
        data = np.memmap(self.path, np.uint8, mode="r") if self.path.stat().st_size else np.empty(0, np.uint8)
        ends = [np.flatnonzero(data[at : at + BLOCK] == ord("\n")) + at for at in range(0, len(data), BLOCK)]
        ends = np.concatenate([*ends, [len(data)]]).astype(np.int64)
        starts = np.concatenate([[0], ends[:-1] + 1])
        index = np.stack([starts, ends, np.arange(1, len(ends) + 1)], axis=1)
        empty = starts == ends
        spaced = ~empty
        spaced[spaced] = np.isin(data[starts[spaced]], SPACE)
        blank = [i for i in np.flatnonzero(empty | spaced).tolist() if not bytes(data[starts[i] : ends[i]]).strip()]
        return np.delete(index, blank, axis=0)

    def count(self) -> int:
        return len(self._index)

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        with self.path.open("rb") as file:
            for number, (start, end, line) in zip(numbers.tolist(), self._index[numbers].tolist(), strict=True):
                file.seek(start)
                yield number, f"{self.name} line {line}", self._line(file.read(end - start), line)

    def stream(self, share: int = 0, shares: int = 1, start: int = 0) -> Generator[Row, None, int]:
        number = -1
        with self.open() as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    number += 1
                    if number % shares == share and number >= start * shares:
                        yield number, f"{self.name} line {line}", self._line(text, line)
        return _of_share(number + 1, share, shares)

    def _line(self, text: bytes, line: int) -> dict[str, Any]:
        try:
            row = self.read(text.decode("utf-8-sig" if line == 1 else "utf-8"))
        except json.JSONDecodeError as error:
            is_json = extension(self.path).startswith(".json") and not extension(self.path).startswith(".jsonl")
            cure = "; make it an array, or one object a line" if is_json else ""
            raise ValueError(
                f"{self.name} line {line} is not JSON: {error.msg} at column {error.colno}{cure}"
            ) from error
        except RecursionError:
            raise ValueError(f"{self.name} line {line} is JSON that is nested too deeply to be read") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.name} line {line} is not UTF-8: {error.reason}") from error
        except ValueError as error:  # a number of more digits than Python reads
            raise ValueError(f"{self.name} line {line} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.name} line {line} is {kind_of(row)}, where an object is expected")
        return row


class CompressedLines(Lines):
    """Lines of a gzip file, which is read from its start to its end: a row is reached by way of those before it."""

    def __init__(self, path: Path, read: Callable[[str], dict[str, Any]]):
        super().__init__(path, read)
        self._reader: Iterator[tuple[int, int, bytes]] | None = None  # where `rows` has come to
        self._next = 0  # number of the row that it gives next

    def count(self) -> int:
        return sum(1 for _ in self._numbered())

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for wanted in numbers.tolist():
            if self._reader is None or wanted < self._next:
                self._reader = self._numbered()
            for number, line, text in self._reader:
                self._next = number + 1
                if number == wanted:
                    yield number, f"{self.name} line {line}", self._line(text, line)
                    break

    def _numbered(self) -> Iterator[tuple[int, int, bytes]]:
        """Rows, from the first on, as (number, line, text)."""
        number = -1
        with self.open() as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    number += 1
                    yield number, line, text


class JsonArray(Parsed):
    def parse(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with self.open() as file:
            data = file.read()
        text = ""
        try:
            text = data.decode("utf-8-sig")
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.name} line {error.lineno} is not JSON: {error.msg}") from error
        except RecursionError:
            raise ValueError(
                f"{self.name} line {_deepest_line(text)} is JSON that is nested too deeply to be read"
            ) from None
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{self.name} line {line} is not UTF-8: {error.reason}") from error
        except ValueError as error:  # as of lines
            raise ValueError(f"{self.name} is not JSON: {error}") from error
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise ValueError(f"{self.name}: element {number} is {kind_of(row)}, where an object is expected")
            yield number, row

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for number, place, row in super().rows(numbers):
            yield number, place.replace(" line ", " element "), row


class Csv(Parsed):
    def __init__(self, path: Path, delimiter: str = ","):
        super().__init__(path)
        self.delimiter = delimiter

    def parse(self) -> Iterator[tuple[int, dict[str, Any]]]:
        csv.field_size_limit(1 << 30)
        with self.open() as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            reader = csv.DictReader(text, strict=True, delimiter=self.delimiter)
            try:
                if repeated := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
                    raise ValueError(f"{self.name} line 1 names the column {repeated[0]!r} twice: rename one of them")
                for row in reader:
                    if None in row or None in row.values():
                        columns = len(reader.fieldnames or [])
                        lacking = sum(value is None for value in row.values())
                        fields = columns + len(row.get(None, ())) - lacking  # type: ignore[call-overload]
                        raise ValueError(
                            f"{self.name} line {reader.line_num} has {plural(fields, 'field')}, and the header has "
                            f"{columns}"
                        )
                    yield reader.line_num, row
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name} line {self._undecodable()} is not UTF-8: {error.reason}") from error
            except csv.Error as error:
                kind = "CSV" if self.delimiter == "," else "TSV"
                raise ValueError(f"{self.name} line {reader.line_num + 1} is not {kind}: {error}") from error

    def _undecodable(self) -> int:
        """The number of the first line that is not UTF-8: text is decoded many lines at a time."""
        with self.open() as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    return number
        return 1


class Batched(File):
    """Arrow tables, of which a batch of rows is in memory at a time."""

    @property
    @abstractmethod
    def _starts(self) -> np.ndarray:
        """The first row of each batch, and the end."""

    @abstractmethod
    def _batch(self, number: int) -> Any:
        """A batch, as something with Arrow's `take`."""

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        starts = self._starts
        for batch in np.unique(np.searchsorted(starts, numbers, side="right") - 1).tolist():
            inside = numbers[(numbers >= starts[batch]) & (numbers < starts[batch + 1])]
            rows = self._batch(batch).take(inside - starts[batch]).to_pylist()
            for number, row in zip(inside.tolist(), rows, strict=True):
                yield number, f"{self.name} row {number + 1}", ArrowRow(row)


class Arrow(Batched):
    """Arrow's IPC format, memory-mapped: a file, or a stream, as `datasets` writes it."""

    @cached_property
    def _batches(self) -> list:
        import pyarrow as pa

        try:
            data = pa.memory_map(str(self.path))
            try:
                reader = pa.ipc.open_file(data)
            except pa.ArrowInvalid:
                data.seek(0)
                reader = pa.ipc.open_stream(data)
            return [batch for batch in reader.read_all().to_batches() if batch.num_rows]
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} is not Arrow: {error}") from error

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0] + [batch.num_rows for batch in self._batches])

    def _batch(self, number: int) -> Any:
        return self._batches[number]

    def count(self) -> int:
        return int(self._starts[-1])

    def stream(self, share: int = 0, shares: int = 1, start: int = 0) -> Generator[Row, None, int]:
        numbers = np.arange(share, self.count(), shares)[start:]
        for first in range(0, len(numbers), AT_A_TIME):
            yield from self.rows(numbers[first : first + AT_A_TIME])
        return _of_share(self.count(), share, shares)


class Parquet(Batched):
    """Read by row groups, of which the last one read is kept."""

    @cached_property
    def _file(self):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path, memory_map=True)
        except pa.ArrowException as error:
            raise ValueError(f"{self.name} is not Parquet: {error}") from error

    def count(self) -> int:
        return self._file.metadata.num_rows

    @cached_property
    def _starts(self) -> np.ndarray:
        """The first row of each group, and the end."""
        groups = range(self._file.num_row_groups)
        return np.cumsum([0] + [self._file.metadata.row_group(group).num_rows for group in groups])

    def stream(self, share: int = 0, shares: int = 1, start: int = 0) -> Generator[Row, None, int]:
        groups = np.flatnonzero(self._starts[1:] > start * shares).tolist()
        first = int(self._starts[groups[0]]) if groups else 0
        for batch in self._file.iter_batches(row_groups=groups):
            numbers = np.arange(first, first + batch.num_rows)
            numbers = numbers[(numbers % shares == share) & (numbers >= start * shares)]
            for number, row in zip(numbers.tolist(), batch.take(numbers - first).to_pylist(), strict=True):
                yield number, f"{self.name} row {number + 1}", ArrowRow(row)
            first += batch.num_rows
        return _of_share(self.count(), share, shares)

    def _batch(self, number: int) -> Any:
        if getattr(self, "_kept", (None,))[0] != number:
            self._kept = number, self._file.read_row_group(number)
        return self._kept[1]


class Joined(Source):
    """Several sources one after another."""

    def __init__(self, name: str, sources: list[File]):
        self.name, self.sources = name, sources

    @property
    def fingerprint(self) -> str:
        return " ".join(source.fingerprint for source in self.sources)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0] + [len(source) for source in self.sources])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for source, start, stop in zip(self.sources, self._starts[:-1], self._starts[1:], strict=True):
            inside = numbers[(numbers >= start) & (numbers < stop)] - start
            for number, place, row in source.rows(inside) if len(inside) else ():
                yield number + int(start), place, row

    def stream(self, share: int = 0, shares: int = 1, start: int = 0) -> Iterator[Row]:
        for source in self.sources:
            start = max(start - (yield from source.stream(share, shares, start)), 0)


def _deepest_line(text: str) -> int:
    """The line of a JSON text where it is nested more deeply than Python's parser goes."""
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token.group(), 0)
        if depth > DEPTH:
            return text.count("\n", 0, token.start()) + 1
    return 1


def _of_share(rows: int, share: int, shares: int) -> int:
    """How many of so many rows are of a share."""
    return len(range(share, rows, shares))
