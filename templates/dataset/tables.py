"""Readers of files with Arrow tables: Arrow's IPC format, and Parquet."""

from abc import abstractmethod
from collections.abc import Generator, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..formats.schemas import ArrowRow
from .files import STREAM_ROWS, File, shard_size
from .tokenize import Row

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


class TableFile(File):
    """File of an Arrow table, read in batches of rows."""

    @property
    @abstractmethod
    def _starts(self) -> np.ndarray:
        """First row of each batch, and the end."""

    @abstractmethod
    def _batch(self, number: int) -> "pa.RecordBatch | pa.Table": ...

    def rows(self, numbers: np.ndarray) -> Iterator[Row]:
        starts = self._starts
        for batch in np.unique(np.searchsorted(starts, numbers, side="right") - 1).tolist():
            selected = numbers[(numbers >= starts[batch]) & (numbers < starts[batch + 1])]
            rows = self._batch(batch).take(selected - starts[batch]).to_pylist()
            for number, row in zip(selected.tolist(), rows, strict=True):
                yield number, f"{self.name} row {number + 1}", ArrowRow(row)


class Arrow(TableFile):
    """Arrow's IPC format, memory-mapped: a file, or a stream as `datasets` writes it."""

    @cached_property
    def _batches(self) -> "list[pa.RecordBatch]":
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

    def _batch(self, number: int) -> "pa.RecordBatch | pa.Table":
        return self._batches[number]

    def count(self) -> int:
        return int(self._starts[-1])

    def stream(self, shard: int = 0, shards: int = 1, start: int = 0) -> Generator[Row, None, int]:
        numbers = np.arange(shard, self.count(), shards)[start:]
        for first in range(0, len(numbers), STREAM_ROWS):
            yield from self.rows(numbers[first : first + STREAM_ROWS])
        return shard_size(self.count(), shard, shards)


class Parquet(TableFile):
    """Parquet file, read by row groups, of which the last one read is kept."""

    @cached_property
    def _file(self) -> "pq.ParquetFile":
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
        groups = range(self._file.num_row_groups)
        return np.cumsum([0] + [self._file.metadata.row_group(group).num_rows for group in groups])

    def stream(self, shard: int = 0, shards: int = 1, start: int = 0) -> Generator[Row, None, int]:
        groups = np.flatnonzero(self._starts[1:] > start * shards).tolist()
        first = int(self._starts[groups[0]]) if groups else 0
        for batch in self._file.iter_batches(row_groups=groups):
            numbers = np.arange(first, first + batch.num_rows)
            numbers = numbers[(numbers % shards == shard) & (numbers >= start * shards)]
            for number, row in zip(numbers.tolist(), batch.take(numbers - first).to_pylist(), strict=True):
                yield number, f"{self.name} row {number + 1}", ArrowRow(row)
            first += batch.num_rows
        return shard_size(self.count(), shard, shards)

    def copy_to_arrow(self, path: Path, batch_rows: int) -> None:
        """Write all rows to an Arrow file, in batches of at most `batch_rows`."""
        import pyarrow as pa

        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, self._file.schema_arrow) as writer:
            for batch in self._file.iter_batches(batch_size=batch_rows):
                writer.write_batch(batch)

    def _batch(self, number: int) -> "pa.RecordBatch | pa.Table":
        if getattr(self, "_last_group", (None,))[0] != number:
            self._last_group = number, self._file.read_row_group(number)
        return self._last_group[1]
