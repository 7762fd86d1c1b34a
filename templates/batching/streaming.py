"""Streamed data: rows are read, tokenized and packed during training, by each data-parallel rank on its own.

Worker w of rank r reads every (ranks x workers)-th row, so no process is a bottleneck, and the order depends on the
seed, the ranks and the workers alone. Each micro batch comes with the state of its shard (stream_cursor.py).
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from itertools import count, groupby, islice

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..dataset.files import RowSource
from ..dataset.packing import pack
from ..dataset.store import DroppedRows, Runs, TokenizedSample
from ..dataset.tokenize import Encoder, Row
from ..formats.schemas import Stage
from ..json_types import JsonObject
from ..options import TemplateOptions
from .collator import Batch, BatchLayout, GlobalTotals, StepDivision, total_weight
from .sample_order import PackingRule, differences
from .stream_cursor import Block, Cursor, CursorTracker, CursorUpdate, DocumentName, StreamLane, reshard

logger = logging.getLogger(__name__)

CHUNK = 64  # rows tokenized at a time
PACKS_AHEAD = 16  # packs' worth of tokens from which the best fit is chosen
MOST_LEFT_OVER = 16  # times that the packer may leave a document over: one that fits nowhere would wait forever

NumberedRows = Iterator[tuple[int, Row]]  # rows with their numbers within a shard of a source
NumberedSample = tuple[int, TokenizedSample]


class TokenStream:
    """Sources whose rows are tokenized as they are read, each with the number of rows to take (None: all)."""

    def __init__(
        self, sources: list[tuple[RowSource, int | None]], encoder: Encoder, shuffle_buffer: int, strict: bool
    ):
        self.sources, self.encoder = sources, encoder
        self.shuffle_buffer, self.strict = shuffle_buffer, strict

    @property
    def stage(self) -> Stage:
        return self.encoder.stage

    def open(self, lane: StreamLane, start: int) -> NumberedRows:
        """Yield the rows of the lane's shard of its source, from number `start` on."""
        source, limit = self.sources[lane.source]
        return enumerate(_head(source.stream(lane.shard, lane.shards, start), limit), start)

    @property
    def fingerprint(self) -> JsonObject:
        """Options that determine the documents."""
        options = {f"--{field.name}": getattr(self.encoder.options, field.name) for field in fields(TemplateOptions)}
        names = [source.name if rows is None else f"{source.name}#{rows}" for source, rows in self.sources]
        return {"--dataset": names, "--columns": self.encoder.columns, **options}


def _head(rows: Iterator[Row], limit: int | None) -> Iterator[Row]:
    for row in rows:
        if limit is not None and row[0] >= limit:
            return
        yield row


class StreamShard:
    """Endless documents of a shard from a cursor on, numbered from the cursor.

    They are read and shuffled block by block; the next block is read while one is yielded.
    Raises ValueError if an epoch yields no document, or with --strict true if a row is dropped.
    """

    def __init__(self, stream: TokenStream, cursor: Cursor, shuffle: bool, seed: int):
        self.stream, self.cursor, self.shuffle, self.seed = stream, cursor, shuffle, seed
        self._new_blocks: list[Block] = []
        self._dropped = DroppedRows()
        self._opened: dict[StreamLane, NumberedRows] = {}  # sources that are open at a lane's start, or before it

    def pop_blocks(self) -> list[Block]:
        """Return the blocks begun since the last call."""
        blocks, self._new_blocks = self._new_blocks, []
        return blocks

    def __iter__(self) -> Iterator[NumberedSample]:
        number, documents = 0, self._reread()
        blocks = self._blocks()
        while True:
            next_block = None
            for position, document in enumerate(documents):
                if position % CHUNK == 0 and next_block is None:
                    next_block = next(blocks)
                yield number, document
                number += 1
            cursor, documents = next_block or next(block for block in blocks if block)
            self._new_blocks.append(Block(number, cursor))

    def _blocks(self) -> Iterator[tuple[Cursor, list[TokenizedSample]] | None]:
        """Yield each block with the cursor before it, and None after each chunk of rows read for it."""
        start = self.cursor
        rows = max(self.stream.shuffle_buffer, 1) if self.shuffle else CHUNK
        for epoch in count(start.epoch):
            lanes = start.lanes_of(epoch, len(self.stream.sources))
            open_lanes = deque((lane, self._rows(lane)) for lane in lanes)
            later = tuple(lane for lane in start.lanes if lane.epoch > epoch)
            is_empty = True
            for block in count(start.block if epoch == start.epoch else 0):
                documents: list[tuple[DocumentName, TokenizedSample]] = []
                read = 0
                while chunk := list(islice(_round_robin(open_lanes), min(CHUNK, rows - read))):
                    read += len(chunk)
                    documents += self._encode(chunk)
                    yield None
                if not read:
                    break
                is_empty = is_empty and not documents
                if self.shuffle:
                    order = np.random.default_rng([self.seed, epoch, start.shard, block]).permutation(len(documents))
                    documents = [documents[position] for position in order.tolist()]
                cursor = Cursor(
                    start.shard,
                    start.shards,
                    epoch,
                    block + 1,
                    lanes=tuple(lane for lane, _ in open_lanes) + later,
                    regular_from=max(start.regular_from, epoch + 1),
                    documents=np.array([name for name, _ in documents], np.int64).reshape(
                        -1, len(DocumentName._fields)
                    ),
                )
                yield cursor, [document for _, document in documents]
            if epoch >= start.regular_from and is_empty:
                names = ", ".join(source.name for source, _ in self.stream.sources)
                raise ValueError(
                    f"--dataset {names}: shard {start.shard + 1} of {start.shards} has no usable row. The data is "
                    "empty, has fewer rows than shards (data-parallel ranks x --dataloader_num_workers), or every row "
                    "is dropped (see the warnings). Fix the data, or set a lower --dataloader_num_workers."
                )

    def _rows(self, lane: StreamLane) -> NumberedRows:
        opened = self._opened.pop(lane, None)
        for number, row in opened if opened is not None else self.stream.open(lane, lane.start):
            if number >= lane.start and (number - lane.start) % lane.step == 0:
                yield number, row

    def _reread(self) -> list[TokenizedSample]:
        """Return the documents that the cursor names, without tokenizing the other rows before it."""
        documents: dict[DocumentName, TokenizedSample] = {}
        names = [DocumentName(*name) for name in self.cursor.documents.tolist()]
        for key, group in groupby(sorted(names), lambda name: name[:4]):
            numbers = {name.row for name in group}
            lane, last = StreamLane(*key), max(numbers)
            rows = self.stream.open(lane, min(numbers))
            chunk = []
            for number, row in rows:
                if number in numbers:
                    chunk.append((lane._replace(start=number), row))
                if number == last:
                    break
            for i in range(0, len(chunk), CHUNK):
                documents |= self._encode(chunk[i : i + CHUNK])
            # The lane continues with this open source, so that the rows before it are read once.
            continued = [other for other in self.cursor.lanes if other[:4] == key and other.start > last]
            if continued:
                self._opened[continued[0]] = rows
        if missing := next((name for name in names if name not in documents), None):
            source, _ = self.stream.sources[missing.source]
            raise ValueError(
                f"{source.name}: has changed: a row that the checkpoint names is missing. Restore the data."
            )
        return [documents[name] for name in names]

    def _encode(self, rows: list[tuple[StreamLane, Row]]) -> list[tuple[DocumentName, TokenizedSample]]:
        """Return the documents of rows, each given with the lane that starts at it."""
        samples, dropped = self.stream.encoder.encode(
            [(number, location, columns) for number, (_, (_, location, columns)) in enumerate(rows)]
        )
        self._report(dropped)
        named = []
        for number, pieces in groupby(samples, lambda sample: sample.row):
            lane, _ = rows[number]
            for piece, sample in enumerate(pieces):
                documents = [(ids, _decode_runs(runs)) for ids, runs in sample.documents]
                tokenized = TokenizedSample(documents, np.array(sample.label, np.float32))
                named.append((DocumentName(*lane[:4], lane.start, piece), tokenized))
        return named

    def _report(self, dropped: DroppedRows) -> None:
        for reason in dropped.counts.keys() - self._dropped.counts.keys():
            message = f"{dropped.places[reason][0]}: {reason}"
            if self.stream.strict:
                raise ValueError(f"{message} (--strict true)")
            logger.warning("dropped: %s (and all others like it)", message)
        self._dropped.merge(dropped)


def _decode_runs(runs: Runs) -> np.ndarray:
    tokens, weights = zip(*runs, strict=True)
    return np.repeat(np.array(weights, np.float32), tokens)


def _round_robin(lanes: deque[tuple[StreamLane, NumberedRows]]) -> Iterator[tuple[StreamLane, Row]]:
    """Yield one row of each lane in turn until all have ended, with the lane that starts at it. Advances `lanes`."""
    while lanes:
        lane, rows = lanes.popleft()
        if numbered := next(rows, None):
            number, row = numbered
            lanes.append((lane._replace(start=number + lane.step), rows))
            yield lane._replace(start=number), row


class _SamplePacker:
    """Samples of a shard: its documents, or packs of the best fit among the next ones.

    The documents of the last pack, which is the emptiest, wait to be packed with later ones.
    """

    def __init__(self, shard: StreamShard, layout: BatchLayout, seed: int):
        self.shard, self.documents, self.layout, self.seed = shard, iter(shard), layout, seed
        self.next_document = 0
        self.ready = deque([self._take() for _ in range(size)] for size in shard.cursor.packs)
        self.waiting = [self._take() for _ in shard.cursor.waiting]
        self.left_over = shard.cursor.waiting  # of each waiting document, how often it was left over

    def __next__(self) -> list[TokenizedSample]:
        if not self.ready:
            self._fill()
        return [document for _, document in self.ready.popleft()]

    def update(self) -> CursorUpdate:
        """Return the state of the shard after the samples so far."""
        pending = tuple(number for documents in (*self.ready, self.waiting) for number, _ in documents)
        packs = tuple(len(documents) for documents in self.ready)
        blocks = self.shard.pop_blocks()
        return CursorUpdate(self.shard.cursor.shard, blocks, pending, packs, self.left_over, self.next_document)

    def _take(self) -> NumberedSample:
        number, document = next(self.documents)
        self.next_document = number + 1
        return number, document

    def _fill(self) -> None:
        capacity = self.layout.pack_length
        if capacity is None:
            self.ready.append([self._take()])
            return
        documents = self.waiting
        tokens = sum(int(_lengths(sample).sum()) for _, sample in documents)
        while tokens < PACKS_AHEAD * capacity:
            documents.append(self._take())
            tokens += int(_lengths(documents[-1][1]).sum())
        lengths = [self.layout.padded(_lengths(sample)).sum() for _, sample in documents]
        packs = pack(np.array(lengths), capacity, self.seed)
        self.ready.extend([documents[i] for i in packs[number].tolist()] for number in range(len(packs)))
        earlier = dict(enumerate(self.left_over))
        left_over = tuple(earlier.get(i, 0) + 1 for i in packs[len(packs) - 1].tolist())
        if max(left_over) <= MOST_LEFT_OVER:
            self.waiting, self.left_over = self.ready.pop(), left_over
        else:
            self.waiting, self.left_over = [], ()


def _lengths(sample: TokenizedSample) -> np.ndarray:
    return np.array([len(ids) for ids, _ in sample.documents])


class StreamedBatches(IterableDataset):
    """Endless micro batches of one data-parallel rank, each with the state of its shard after it.

    Their loss_tokens count their own tokens only.
    """

    samples = steps_per_epoch = None
    stored_samples = 0

    def __init__(
        self,
        stream: TokenStream,
        layout: BatchLayout,
        division: StepDivision,
        *,
        workers: int,
        shuffle: bool,
        seed: int,
    ):
        self.stream, self.layout, self.division = stream, layout, division
        self.workers, self.shuffle, self.seed = workers, shuffle, seed
        readers = division.ranks * workers
        self._begin([Cursor(division.rank * workers + worker, readers) for worker in range(workers)], 0)

    def _begin(self, cursors: list[Cursor], turn: int) -> None:
        """Set the cursors of this rank's workers, and the worker that is next."""
        self.starts, self.turn = cursors, turn
        self.trackers = {cursor.shard: CursorTracker(cursor) for cursor in cursors}

    def __iter__(self) -> Iterator[tuple[Batch, CursorUpdate]]:
        worker = get_worker_info()
        # The loader begins with its first process, which therefore reads the shard that is next.
        cursor = self.starts[(self.turn + (worker.id if worker else 0)) % self.workers]
        samples = _SamplePacker(StreamShard(self.stream, cursor, self.shuffle, self.seed), self.layout, self.seed)
        while True:
            micro_batch = [next(samples) for _ in range(self.division.micro_batch_size)]
            update = samples.update()
            totals = GlobalTotals(total_weight(micro_batch), float(sum(map(len, micro_batch))))
            yield self.layout.collate(micro_batch, totals), update

    def padding_share(self) -> None:
        return None

    def samples_until(self, epochs: float, micro_batches: int) -> None:
        return None

    def position(self, micro_batches: int) -> JsonObject:
        """Return the position after this many micro batches, without the cursors of each rank."""
        return self._fingerprint | {
            "ranks": self.division.ranks,
            "workers": self.workers,
            "turn": (self.turn + micro_batches) % self.workers,
            "packing": list(PackingRule.of(self.layout)),
        }

    def cursors(self) -> dict[str, np.ndarray]:
        """Return the cursors of this rank's workers after the micro batches passed to `trackers`."""
        arrays = {}
        for worker, tracker in enumerate(self.trackers.values()):
            arrays |= tracker.cursor.to_arrays(_name(self.division.rank, worker))
        return arrays

    def resume(self, position: JsonObject, arrays: dict[str, np.ndarray]) -> list[str]:
        """Set the position. Return notes for the user; raise ValueError if the data is different."""
        if differing := differences(position, self._fingerprint):
            raise ValueError(f"the stream is not the checkpoint's: {differing}")
        ranks, workers = position["ranks"], position["workers"]
        current = {"ranks": self.division.ranks, "workers": self.workers, "packing": list(PackingRule.of(self.layout))}
        if not (differing := differences(position, current)):
            names = [_name(self.division.rank, worker) for worker in range(workers)]
            self._begin([Cursor.from_arrays(arrays, name) for name in names], position["turn"])
            return []
        names = [_name(rank, worker) for rank in range(ranks) for worker in range(workers)]
        cursors = [Cursor.from_arrays(arrays, name) for name in names]
        resharded = reshard(cursors, len(self.stream.sources), self.division.ranks * self.workers)
        first = self.division.rank * self.workers
        self._begin(resharded[first : first + self.workers], 0)
        return [f"the rows left of this epoch of the stream are redistributed ({differing})"]

    @property
    def _fingerprint(self) -> JsonObject:
        return self.stream.fingerprint | {
            "--data_seed": self.seed,
            "--train_dataloader_shuffle": self.shuffle,
            "--shuffle_buffer_size": self.stream.shuffle_buffer,
        }


def _name(rank: int, worker: int) -> str:
    return f"data/{rank}/{worker}"
