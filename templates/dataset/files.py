"""Sources of rows with a common interface, and readers of file formats.

A source has a number of rows and a fingerprint of its content, returns rows by number, and iterates over all rows for
streaming. Fingerprints and row counts of files are cached with the tokens, so that a large file is read only once for
them.
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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, TypedDict

import numpy as np

from ..cache import cache_root
from ..formats.dataset_names import extension
from ..formats.schemas import json_type
from ..json_types import JsonObject
from ..machine import process_scope
from ..plural import plural
from .tokenize import Row

SPACE = np.frombuffer(b" \t\r\x0b\x0c", np.uint8)  # first bytes of a line that may be blank
BLOCK = 1 << 26  # bytes of a file to scan at a time
STREAM_ROWS = 1000  # rows of a stream converted to Python at a time, because a batch may be as large as its file
MAX_DEPTH = 900  # nesting of JSON; Python's parser supports about 1000 levels


class FileFacts(TypedDict):
    """Cached facts about a file."""

    fingerprint: str
    rows: int


class RowSource(ABC):
    """Dataset of rows. Reading broken data raises ValueError with the file and the line."""

    name: str

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        """Yield the rows with these sorted numbers."""

    @abstractmethod
    def stream(self, shard: int = 0, shards: int = 1, start: int = 0) -> Generator[Row, None, int]:
        """Yield every `shards`-th row from row `shard` on, except the first `start` of these.

        Other rows are parsed as little as possible. Returns the number of rows of the shard, including skipped ones.
        """


class File(RowSource):
    """File on disk."""

    def __init__(self, path: Path):
        self.path, self.name = path, str(path)

    @cached_property
    def _facts(self) -> FileFacts:
        stat = self.path.stat()
        # ctime as well, because copies may preserve mtime (cp -p, rsync).
        identity = f"{self.path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        key = hashlib.blake2b(identity.encode(), digest_size=16)
        cache_file = cache_root() / "files" / f"{key.hexdigest()}.json"
        with suppress(OSError, ValueError):
            return json.loads(cache_file.read_text())
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        facts: FileFacts = {"fingerprint": digest.hexdigest() + extension(self.path), "rows": self.count()}
        # A file may change again within one tick of the clock.
        if time.time_ns() - stat.st_ctime_ns > 2e9:
            with suppress(OSError):
                cache_file.parent.mkdir(parents=True, exist_ok=True)
                temporary = cache_file.with_suffix(f".{process_scope()}-{os.getpid()}")
                temporary.write_text(json.dumps(facts))
                temporary.rename(cache_file)
        return facts

    @property
    def fingerprint(self) -> str:
        return self._facts["fingerprint"]

    def __len__(self) -> int:
        return self._facts["rows"]

    @abstractmethod
    def count(self) -> int: ...

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the file, decompressed if its name ends in .gz."""
        if not extension(self.path).endswith(".gz"):
            with self.path.open("rb") as file:
                yield file
            return
        try:
            with gzip.open(self.path, "rb") as file:
                yield file  # type: ignore[misc]
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{self.name}: the gzip file is damaged or truncated ({error}). Copy it again.") from error


class ParsedFile(File):
    """File that is parsed as a whole."""

    def count(self) -> int:
        return len(self._parsed_rows)

    @abstractmethod
    def parse(self) -> Iterator[tuple[int, JsonObject]]:
        """Yield (line number, columns) of all rows."""

    @cached_property
    def _parsed_rows(self) -> list[tuple[int, JsonObject]]:
        return list(self.parse())

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for number in numbers.tolist():
            line, row = self._parsed_rows[number]
            yield number, f"{self.name} line {line}", row

    def stream(self, shard: int = 0, shards: int = 1, start: int = 0) -> Generator[Row, None, int]:
        number = -1
        for number, (line, row) in enumerate(self.parse()):
            if number % shards == shard and number >= start * shards:
                yield number, f"{self.name} line {line}", row
        return shard_size(number + 1, shard, shards)


class LineFile(File):
    """File with a row of JSON or plain text in each line that is not blank."""

    def __init__(self, path: Path, read: Callable[[str], JsonObject]):
        super().__init__(path)
        self.read = read

    @cached_property
    def _index(self) -> np.ndarray:
        """Start, end and number (from 1) of each line that is not blank: [rows, 3]."""
        data = np.memmap(self.path, np.uint8, mode="r") if self.path.stat().st_size else np.empty(0, np.uint8)
        ends = [
            np.flatnonzero(data[start : start + BLOCK] == ord("\n")) + start for start in range(0, len(data), BLOCK)
        ]
        ends = np.concatenate([*ends, [len(data)]]).astype(np.int64)
        starts = np.concatenate([[0], ends[:-1] + 1])
        index = np.stack([starts, ends, np.arange(1, len(ends) + 1)], axis=1)
        is_empty = starts == ends
        starts_with_space = ~is_empty
        starts_with_space[starts_with_space] = np.isin(data[starts[starts_with_space]], SPACE)
        blank_lines = [
            i
            for i in np.flatnonzero(is_empty | starts_with_space).tolist()
            if not bytes(data[starts[i] : ends[i]]).strip()
        ]
        return np.delete(index, blank_lines, axis=0)

    def count(self) -> int:
        return len(self._index)

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        with self.path.open("rb") as file:
            for number, (start, end, line) in zip(numbers.tolist(), self._index[numbers].tolist(), strict=True):
                file.seek(start)
                yield number, f"{self.name} line {line}", self._line(file.read(end - start), line)

    def stream(self, shard: int = 0, shards: int = 1, start: int = 0) -> Generator[Row, None, int]:
        number = -1
        with self.open() as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    number += 1
                    if number % shards == shard and number >= start * shards:
                        yield number, f"{self.name} line {line}", self._line(text, line)
        return shard_size(number + 1, shard, shards)

    def _line(self, text: bytes, line: int) -> JsonObject:
        try:
            row = self.read(text.decode("utf-8-sig" if line == 1 else "utf-8"))
        except json.JSONDecodeError as error:
            is_json = extension(self.path).startswith(".json") and not extension(self.path).startswith(".jsonl")
            fix = ". Write it as an array, or as one object per line." if is_json else ""
            raise ValueError(
                f"{self.name} line {line} is not JSON: {error.msg} at column {error.colno}{fix}"
            ) from error
        except RecursionError:
            raise ValueError(f"{self.name} line {line} is nested too deeply") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.name} line {line} is not UTF-8: {error.reason}") from error
        except ValueError as error:  # a number with more digits than Python reads
            raise ValueError(f"{self.name} line {line} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.name} line {line} is {json_type(row)}, where an object is expected")
        return row


class GzipLineFile(LineFile):
    """Gzip-compressed file of lines. Reading a row also reads all rows before it."""

    def __init__(self, path: Path, read: Callable[[str], JsonObject]):
        super().__init__(path, read)
        self._reader: Iterator[tuple[int, int, bytes]] | None = None  # iterator of `rows`, kept between calls
        self._next = 0  # number of the reader's next row

    def count(self) -> int:
        return sum(1 for _ in self._numbered())

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for requested in numbers.tolist():
            if self._reader is None or requested < self._next:
                self._reader = self._numbered()
            for number, line, text in self._reader:
                self._next = number + 1
                if number == requested:
                    yield number, f"{self.name} line {line}", self._line(text, line)
                    break

    def _numbered(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (row number, line number, text) of all rows."""
        number = -1
        with self.open() as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    number += 1
                    yield number, line, text


class JsonArray(ParsedFile):
    def parse(self) -> Iterator[tuple[int, JsonObject]]:
        with self.open() as file:
            data = file.read()
        text = ""
        try:
            text = data.decode("utf-8-sig")
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.name} line {error.lineno} is not JSON: {error.msg}") from error
        except RecursionError:
            raise ValueError(f"{self.name} line {_deepest_line(text)} is nested too deeply") from None
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise ValueError(f"{self.name} line {line} is not UTF-8: {error.reason}") from error
        except ValueError as error:  # as in LineFile
            raise ValueError(f"{self.name} is not JSON: {error}") from error
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise ValueError(f"{self.name}: element {number} is {json_type(row)}, where an object is expected")
            yield number, row

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        for number, location, row in super().rows(numbers):
            yield number, location.replace(" line ", " element "), row


class Csv(ParsedFile):
    def __init__(self, path: Path, delimiter: str = ","):
        super().__init__(path)
        self.delimiter = delimiter

    def parse(self) -> Iterator[tuple[int, JsonObject]]:
        csv.field_size_limit(1 << 30)
        with self.open() as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            reader = csv.DictReader(text, strict=True, delimiter=self.delimiter)
            try:
                if repeated := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
                    raise ValueError(f"{self.name} line 1 names the column {repeated[0]!r} twice. Rename one of them.")
                for row in reader:
                    if None in row or None in row.values():
                        columns = len(reader.fieldnames or [])
                        missing = sum(value is None for value in row.values())
                        fields = columns + len(row.get(None, ())) - missing  # type: ignore[call-overload]
                        raise ValueError(
                            f"{self.name} line {reader.line_num} has {plural(fields, 'field')}, and the header has "
                            f"{columns}"
                        )
                    yield reader.line_num, row
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.name} line {self._first_undecodable_line()} is not UTF-8: {error.reason}"
                ) from error
            except csv.Error as error:
                kind = "CSV" if self.delimiter == "," else "TSV"
                raise ValueError(f"{self.name} line {reader.line_num + 1} is not {kind}: {error}") from error

    def _first_undecodable_line(self) -> int:
        """Return the number of the first line that is not UTF-8, which the decoder does not report."""
        with self.open() as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    return number
        return 1


class Concatenation(RowSource):
    """Sources read one after another."""

    def __init__(self, name: str, sources: "Sequence[RowSource]"):
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
            selected = numbers[(numbers >= start) & (numbers < stop)] - start
            for number, location, row in source.rows(selected) if len(selected) else ():
                yield number + int(start), location, row

    def stream(self, shard: int = 0, shards: int = 1, start: int = 0) -> Generator[Row, None, int]:
        size = 0
        for source in self.sources:
            size += yield from source.stream(shard, shards, max(start - size, 0))
        return size


def _deepest_line(text: str) -> int:
    """Return the line where a JSON text is nested deeper than Python's parser supports."""
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token.group(), 0)
        if depth > MAX_DEPTH:
            return text.count("\n", 0, token.start()) + 1
    return 1


def shard_size(rows: int, shard: int, shards: int) -> int:
    """Return the number of rows of one of several shards, each of which takes every n-th row."""
    return len(range(shard, rows, shards))
