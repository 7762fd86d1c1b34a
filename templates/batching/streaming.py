"""Streamed data: each data-parallel rank reads, tokenizes and packs its rows during training.

Each worker of each rank reads every (ranks x workers)-th row, so no process is a bottleneck, and the order depends only
on the seed and the numbers of ranks and workers. Each micro batch comes with the state of its shard (stream_cursor.py).
"""

import logging
from collections import deque
from collections.abc import Iterator
from itertools import count, groupby, islice

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..dataset.dropped_rows import DroppedRows
from ..dataset.files import RowSource
from ..dataset.packing import pack
from ..dataset.placed_media import concatenated_media, expand
from ..dataset.samples import TokenizedSample, decode_runs
from ..dataset.tokenize import Encoder, Row
from ..formats.schemas import Stage
from ..json_types import JsonObject
from .collator import Batch, BatchLayout, GlobalTotals, StepDivision, total_weight
from .sample_order import PackingRule, differences
from .stream_cursor import Block, Cursor, CursorTracker, CursorUpdate, DocumentName, StreamLane, reshard

logger = logging.getLogger(__name__)

CHUNK = 64  # rows tokenized at a time
PACKS_AHEAD = 16  # packs to be filled by the documents among which best fit chooses
MAX_LEFT_OVER = 16  # times that the packer may leave over a document, which could otherwise wait forever

NumberedRows = Iterator[tuple[int, Row]]  # rows with their numbers within a shard of a source
NumberedSample = tuple[int, TokenizedSample]


class TokenStream:
    """Sources whose rows are tokenized when read, each with the number of rows to take (None: all)."""

    def __init__(
        self, sources: list[tuple[RowSource, int | None]], encoder: Encoder, shuffle_buffer: int, strict: bool
    ):
        self.sources, self.encoder = sources, encoder
        self.shuffle_buffer, self.strict = shuffle_buffer, strict

    @property
    def stage(self) -> Stage:
        return self.encoder.stage

    @property
    def has_media(self) -> bool:
        """Whether samples may have images or videos."""
        return self.encoder.vision is not None

    def open(self, lane: StreamLane, start: int) -> NumberedRows:
        """Yield the rows of the lane's shard of its source, from number `start` on."""
        source, limit = self.sources[lane.source]
        return enumerate(_limit_rows(source.stream(lane.shard, lane.shards, start), limit), start)

    @property
    def fingerprint(self) -> JsonObject:
        """Options that determine the documents."""
        options = self.encoder.options.first_options() | self.encoder.options.set_additions()
        names = [source.name if rows is None else f"{source.name}#{rows}" for source, rows in self.sources]
        vision = {"limits of images and videos": self.encoder.vision.fingerprint} if self.encoder.vision else {}
        return {"--dataset": names, "--columns": self.encoder.columns, **vision} | {
            f"--{name}": value for name, value in options.items()
        }


def _limit_rows(rows: Iterator[Row], limit: int | None) -> Iterator[Row]:
    for row in rows:
        if limit is not None and row[0] >= limit:
            return
        yield row


class StreamShard:
    """Endless documents of a shard from a cursor on, numbered from the cursor.

    Documents are read and shuffled in blocks. The next block is read while the current one is yielded.
    Raises ValueError if an epoch yields no document, or with --strict true if a row is dropped.
    """

    def __init__(self, stream: TokenStream, cursor: Cursor, shuffle: bool, seed: int):
        self.stream, self.cursor, self.shuffle, self.seed = stream, cursor, shuffle, seed
        self._new_blocks: list[Block] = []
        self._dropped = DroppedRows()
        self._opened: dict[StreamLane, NumberedRows] = {}  # sources opened at the lane's start or before it

    def pop_blocks(self) -> list[Block]:
        """Return the blocks started since the last call."""
        blocks, self._new_blocks = self._new_blocks, []
        return blocks

    def __iter__(self) -> Iterator[NumberedSample]:
        number, documents = 0, self._read_named_documents()
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
        """Yield each block with the cursor before it, and None after each chunk of rows that it reads."""
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
        open_rows = self._opened.pop(lane, None)
        for number, row in open_rows if open_rows is not None else self.stream.open(lane, lane.start):
            if number >= lane.start and (number - lane.start) % lane.step == 0:
                yield number, row

    def _read_named_documents(self) -> list[TokenizedSample]:
        """Return the documents that the cursor names. Tokenizes only their rows."""
        documents: dict[DocumentName, TokenizedSample] = {}
        names = [DocumentName(*name) for name in self.cursor.documents.tolist()]
        for lane_key, group in groupby(sorted(names), lambda name: name[:4]):
            numbers = {name.row for name in group}
            lane, last = StreamLane(*lane_key), max(numbers)
            rows = self.stream.open(lane, min(numbers))
            chunk = []
            for number, row in rows:
                if number in numbers:
                    chunk.append((lane._replace(start=number), row))
                if number == last:
                    break
            for i in range(0, len(chunk), CHUNK):
                documents |= self._encode(chunk[i : i + CHUNK])
            # The lane continues with this open source, so that earlier rows are not read again.
            continuing_lanes = [other for other in self.cursor.lanes if other[:4] == lane_key and other.start > last]
            if continuing_lanes:
                self._opened[continuing_lanes[0]] = rows
        if missing := next((name for name in names if name not in documents), None):
            source, _ = self.stream.sources[missing.source]
            raise ValueError(
                f"{source.name}: has changed: a row that the checkpoint names is missing. Restore the data."
            )
        return [documents[name] for name in names]

    def _encode(self, rows: list[tuple[StreamLane, Row]]) -> list[tuple[DocumentName, TokenizedSample]]:
        """Return the documents of rows. Each row comes with the lane that starts at it."""
        samples, dropped = self.stream.encoder.encode(
            [(number, location, columns) for number, (_, (_, location, columns)) in enumerate(rows)]
        )
        self._report(dropped)
        named = []
        for number, pieces in groupby(samples, lambda sample: sample.row):
            lane, _ = rows[number]
            for piece, sample in enumerate(pieces):
                documents, placed = [(ids, decode_runs(runs)) for ids, runs in sample.documents], []
                if any(sample.media):
                    expanded = [expand(*pair, media) for pair, media in zip(documents, sample.media, strict=True)]
                    documents = [document for document, _ in expanded]
                    placed = concatenated_media((len(ids) for ids, _ in documents), [media for _, media in expanded])
                label = np.array(sample.label, np.float32)
                tokenized = TokenizedSample(documents, label, media=placed, shared=sample.shared)
                named.append((DocumentName(*lane[:4], lane.start, piece), tokenized))
        return named

    def _report(self, dropped: DroppedRows) -> None:
        for reason in dropped.counts.keys() - self._dropped.counts.keys():
            message = f"{dropped.places[reason][0]}: {reason}"
            if self.stream.strict:
                raise ValueError(f"{message} (--strict true)")
            logger.warning("dropped: %s (and all others like it)", message)
        self._dropped.merge(dropped)


def _round_robin(lanes: deque[tuple[StreamLane, NumberedRows]]) -> Iterator[tuple[StreamLane, Row]]:
    """Yield a row of each lane in turn, with the lane that starts at it, until all lanes end. Advances `lanes`."""
    while lanes:
        lane, rows = lanes.popleft()
        if numbered := next(rows, None):
            number, row = numbered
            lanes.append((lane._replace(start=number + lane.step), rows))
            yield lane._replace(start=number), row


class _SamplePacker:
    """Samples of a shard: its documents, or best-fit packs of the next documents.

    The last pack is the emptiest: its documents wait to be packed with later ones.
    """

    def __init__(self, shard: StreamShard, layout: BatchLayout, seed: int):
        self.shard, self.documents, self.layout, self.seed = shard, iter(shard), layout, seed
        self.next_document = 0
        self.ready = deque([self._read_document() for _ in range(size)] for size in shard.cursor.packs)
        self.waiting = [self._read_document() for _ in shard.cursor.waiting]
        self.left_over = shard.cursor.waiting  # how often each waiting document was left over

    def __next__(self) -> list[TokenizedSample]:
        if not self.ready:
            self._fill()
        return [document for _, document in self.ready.popleft()]

    def update(self) -> CursorUpdate:
        """Return the state of the shard after the samples returned so far."""
        pending = tuple(number for documents in (*self.ready, self.waiting) for number, _ in documents)
        packs = tuple(len(documents) for documents in self.ready)
        blocks = self.shard.pop_blocks()
        return CursorUpdate(self.shard.cursor.shard, blocks, pending, packs, self.left_over, self.next_document)

    def _read_document(self) -> NumberedSample:
        number, document = next(self.documents)
        self.next_document = number + 1
        return number, document

    def _fill(self) -> None:
        capacity = self.layout.pack_length
        if capacity is None:
            self.ready.append([self._read_document()])
            return
        documents = self.waiting
        tokens = sum(self._length(sample) for _, sample in documents)
        while tokens < PACKS_AHEAD * capacity:
            documents.append(self._read_document())
            tokens += self._length(documents[-1][1])
        lengths = np.array([self._length(sample, padded=True) for _, sample in documents], np.int64)
        packs = pack(lengths, capacity, self.seed)
        self.ready.extend([documents[i] for i in packs[number].tolist()] for number in range(len(packs)))
        earlier = dict(enumerate(self.left_over))
        left_over = tuple(earlier.get(i, 0) + 1 for i in packs[len(packs) - 1].tolist())
        if max(left_over) <= MAX_LEFT_OVER:
            self.waiting, self.left_over = self.ready.pop(), left_over
        else:
            self.waiting, self.left_over = [], ()

    def _length(self, sample: TokenizedSample, *, padded: bool = False) -> int:
        """Return the tokens of a sample in a row, its documents padded to their multiple if `padded`."""
        lengths = np.array([len(ids) for ids, _ in sample.documents])
        saved = sample.shared if self.layout.shares_prompts else 0
        return int((self.layout.padded(lengths) if padded else lengths).sum()) - saved


class StreamedBatches(IterableDataset):
    """Endless micro batches of one data-parallel rank, each with the state of its shard after it.

    `loss_tokens` counts the tokens of the micro batch only.
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
        """Set the cursors of this rank's workers, and which worker is next."""
        self.starts, self.turn = cursors, turn
        self.trackers = {cursor.shard: CursorTracker(cursor) for cursor in cursors}

    def __iter__(self) -> Iterator[tuple[Batch, CursorUpdate]]:
        worker = get_worker_info()
        # The loader takes the first batch from its first process, which therefore reads the shard that is next.
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
            arrays |= tracker.cursor.to_arrays(_cursor_name(self.division.rank, worker))
        return arrays

    def resume(self, position: JsonObject, arrays: dict[str, np.ndarray]) -> list[str]:
        """Set the position. Return notes for the user; raise ValueError if the data is different."""
        if mismatch := differences(position, self._fingerprint):
            raise ValueError(f"the stream is not the checkpoint's: {mismatch}")
        ranks, workers = position["ranks"], position["workers"]
        current = {"ranks": self.division.ranks, "workers": self.workers, "packing": list(PackingRule.of(self.layout))}
        position = position | {"packing": list(PackingRule(*position["packing"]))}
        if not (mismatch := differences(position, current)):
            names = [_cursor_name(self.division.rank, worker) for worker in range(workers)]
            self._begin([Cursor.from_arrays(arrays, name) for name in names], position["turn"])
            return []
        names = [_cursor_name(rank, worker) for rank in range(ranks) for worker in range(workers)]
        cursors = [Cursor.from_arrays(arrays, name) for name in names]
        resharded = reshard(cursors, len(self.stream.sources), self.division.ranks * self.workers)
        first = self.division.rank * self.workers
        self._begin(resharded[first : first + self.workers], 0)
        return [f"the rows left of this epoch of the stream are redistributed ({mismatch})"]

    @property
    def _fingerprint(self) -> JsonObject:
        return self.stream.fingerprint | {
            "--data_seed": self.seed,
            "--train_dataloader_shuffle": self.shuffle,
            "--shuffle_buffer_size": self.stream.shuffle_buffer,
        }


def _cursor_name(rank: int, worker: int) -> str:
    return f"data/{rank}/{worker}"
