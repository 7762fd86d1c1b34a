"""Data that fits nowhere: read, tokenised and packed while training, by every data-parallel rank for itself.

Rank r's worker w reads every (ranks x workers)-th row, so nothing passes through one process, and the order follows
from the seed, the ranks and the workers alone. With each micro batch comes where its share is (stream_cursor.py).
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from itertools import count, groupby, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..dataset.files import Source
from ..dataset.packing import pack
from ..dataset.store import Group, Refusals, Runs
from ..dataset.tokenize import Encoder, Row
from ..formats.schemas import Stage
from ..options import TemplateOptions
from .collator import Batch, Layout, Totals, total_weight
from .sample_order import Packing, differences
from .stream_cursor import Block, Cursor, Follower, Given, Lane, Named, deal

logger = logging.getLogger(__name__)

CHUNK = 64  # rows tokenised at a time
PACKS_AHEAD = 16  # packs' worth of tokens among which the best fit is looked for
WAITS = 16  # how often a document may wait for that: one that fits nowhere would wait forever

Lines = Iterator[tuple[int, Row]]  # rows with their numbers within a source's share
Numbered = tuple[int, Group]


class TokenStream:
    """Several sources whose rows are tokenised while they are read."""

    def __init__(self, sources: list[tuple[Source, int | None]], encoder: Encoder, shuffle_buffer: int, strict: bool):
        """Of each source the first so many rows are taken (None: all)."""
        self.sources, self.encoder = sources, encoder
        self.shuffle_buffer, self.strict = shuffle_buffer, strict

    @property
    def stage(self) -> Stage:
        return self.encoder.stage

    def open(self, lane: Lane, start: int) -> Lines:
        """The rows of the lane's share of its source from number `start` on."""
        source, limit = self.sources[lane.source]
        return enumerate(_first(source.stream(lane.share, lane.shares, start), limit), start)

    @property
    def facts(self) -> dict[str, Any]:
        """What decides which documents there are."""
        options = {f"--{field.name}": getattr(self.encoder.options, field.name) for field in fields(TemplateOptions)}
        names = [source.name if rows is None else f"{source.name}#{rows}" for source, rows in self.sources]
        return {"--dataset": names, "--columns": self.encoder.columns, **options}


def _first(rows: Iterator[Row], limit: int | None) -> Iterator[Row]:
    for row in rows:
        if limit is not None and row[0] >= limit:
            return
        yield row


class Share:
    """The documents of a share from a cursor on, without end, each with its number, counted from the cursor.

    They are read and shuffled block by block. While a block is given, the next one is read.
    Raises ValueError where a whole epoch has none, and where a row is refused and --strict is true.
    """

    def __init__(self, stream: TokenStream, cursor: Cursor, shuffle: bool, seed: int):
        self.stream, self.cursor, self.shuffle, self.seed = stream, cursor, shuffle, seed
        self.begun: list[Block] = []  # blocks since someone has last taken them from here
        self._refusals = Refusals()
        self._opened: dict[Lane, Lines] = {}  # sources that are open at a lane's start, or before it

    def __iter__(self) -> Iterator[Numbered]:
        number, documents = 0, self._read_again()
        blocks = self._blocks()
        while True:
            following = None
            for place, document in enumerate(documents):
                if place % CHUNK == 0 and following is None:
                    following = next(blocks)
                yield number, document
                number += 1
            cursor, documents = following or next(block for block in blocks if block)
            self.begun.append(Block(number, cursor))

    def _blocks(self) -> Iterator[tuple[Cursor, list[Group]] | None]:
        """Block after block, each with where the share is before it. None: some of its rows have been read."""
        start = self.cursor
        rows = max(self.stream.shuffle_buffer, 1) if self.shuffle else CHUNK
        for epoch in count(start.epoch):
            lanes = start.lanes_of(epoch, len(self.stream.sources))
            turns = deque((lane, self._rows(lane)) for lane in lanes)
            later = tuple(lane for lane in start.lanes if lane.epoch > epoch)
            found = 0
            for block in count(start.block if epoch == start.epoch else 0):
                documents: list[tuple[Named, Group]] = []
                read = 0
                while chunk := list(islice(_in_turn(turns), min(CHUNK, rows - read))):
                    read += len(chunk)
                    documents += self._encode(chunk)
                    yield None
                if not read:
                    break
                found += len(documents)
                if self.shuffle:
                    order = np.random.default_rng([self.seed, epoch, start.share, block]).permutation(len(documents))
                    documents = [documents[place] for place in order.tolist()]
                cursor = Cursor(
                    start.share,
                    start.shares,
                    epoch,
                    block + 1,
                    lanes=tuple(lane for lane, _ in turns) + later,
                    usual=max(start.usual, epoch + 1),
                    documents=np.array([name for name, _ in documents], np.int64).reshape(-1, len(Named._fields)),
                )
                yield cursor, [document for _, document in documents]
            if epoch >= start.usual and not found:
                names = ", ".join(source.name for source, _ in self.stream.sources)
                raise ValueError(
                    f"--dataset {names}: no row of share {start.share + 1} of {start.shares} can be used. The data is "
                    "empty, has fewer rows than shares (data-parallel ranks x --dataloader_num_workers), or every row "
                    "is dropped (the warnings say why)."
                )

    def _rows(self, lane: Lane) -> Lines:
        opened = self._opened.pop(lane, None)
        for number, row in opened if opened is not None else self.stream.open(lane, lane.start):
            if number >= lane.start and (number - lane.start) % lane.step == 0:
                yield number, row

    def _read_again(self) -> list[Group]:
        """The documents that the cursor names. Of its other rows none is tokenised."""
        found: dict[Named, Group] = {}
        names = [Named(*name) for name in self.cursor.documents.tolist()]
        for key, group in groupby(sorted(names), lambda name: name[:4]):
            numbers = {name.row for name in group}
            lane, last = Lane(*key), max(numbers)
            lines = self.stream.open(lane, min(numbers))
            chunk = []
            for number, row in lines:
                if number in numbers:
                    chunk.append((lane._replace(start=number), row))
                if number == last:
                    break
            for i in range(0, len(chunk), CHUNK):
                found |= self._encode(chunk[i : i + CHUNK])
            # The lane goes on from there: what lies before is not read a second time.
            same = [other for other in self.cursor.lanes if other[:4] == key and other.start > last]
            if same:
                self._opened[same[0]] = lines
        if missing := next((name for name in names if name not in found), None):
            source, _ = self.stream.sources[missing.source]
            raise ValueError(f"{source.name} is not what it was: a row that the checkpoint names is not there any more")
        return [found[name] for name in names]

    def _encode(self, rows: list[tuple[Lane, Row]]) -> list[tuple[Named, Group]]:
        """The documents of rows, each of which comes with the lane that starts at it."""
        samples, refusals = self.stream.encoder.encode(
            [(number, place, columns) for number, (_, (_, place, columns)) in enumerate(rows)]
        )
        self._tell(refusals)
        named = []
        for number, pieces in groupby(samples, lambda sample: sample.row):
            lane, _ = rows[number]
            for piece, sample in enumerate(pieces):
                documents = [(ids, _repeated(runs)) for ids, runs in sample.documents]
                group = Group(documents, np.array(sample.label, np.float32))
                named.append((Named(*lane[:4], lane.start, piece), group))
        return named

    def _tell(self, refusals: Refusals) -> None:
        for reason in refusals.counts.keys() - self._refusals.counts.keys():
            message = f"{refusals.places[reason][0]}: {reason}"
            if self.stream.strict:
                raise ValueError(f"{message} (--strict true)")
            logger.warning("dropped: %s (and all others like it)", message)
        self._refusals.merge(refusals)


def _repeated(runs: Runs) -> np.ndarray:
    tokens, weights = zip(*runs, strict=True)
    return np.repeat(np.array(weights, np.float32), tokens)


def _in_turn(turns: deque[tuple[Lane, Lines]]) -> Iterator[tuple[Lane, Row]]:
    """One row of each lane in turn until all have ended, with the lane that starts at it. `turns` moves on with it."""
    while turns:
        lane, rows = turns.popleft()
        if found := next(rows, None):
            number, row = found
            turns.append((lane._replace(start=number + lane.step), rows))
            yield lane._replace(start=number), row


class _Samples:
    """Documents, or packs of the best fit among those at hand; what the last pack would hold waits for company."""

    def __init__(self, share: Share, layout: Layout, seed: int):
        self.documents, self.layout, self.seed = iter(share), layout, seed
        self.following = 0  # number of the next document
        self.ready = deque([self._take() for _ in range(size)] for size in share.cursor.packs)
        self.waiting = [self._take() for _ in share.cursor.waiting]
        self.waited = share.cursor.waiting  # how often each of these has waited

    def __next__(self) -> list[Group]:
        if not self.ready:
            self._fill()
        return [document for _, document in self.ready.popleft()]

    def given(self, share: int, blocks: list[Block]) -> Given:
        """Where the share is, after the samples up to now."""
        pending = tuple(number for group in (*self.ready, self.waiting) for number, _ in group)
        sizes = tuple(len(group) for group in self.ready)
        return Given(share, blocks, pending, sizes, self.waited, self.following)

    def _take(self) -> Numbered:
        number, document = next(self.documents)
        self.following = number + 1
        return number, document

    def _fill(self) -> None:
        capacity = self.layout.pack_length
        if capacity is None:
            self.ready.append([self._take()])
            return
        documents = self.waiting
        tokens = sum(int(_lengths(group).sum()) for _, group in documents)
        while tokens < PACKS_AHEAD * capacity:
            documents.append(self._take())
            tokens += int(_lengths(documents[-1][1]).sum())
        lengths = [self.layout.padded(_lengths(group)).sum() for _, group in documents]
        packs = pack(np.array(lengths), capacity, self.seed)
        self.ready.extend([documents[i] for i in packs[number].tolist()] for number in range(len(packs)))
        waited = dict(enumerate(self.waited))
        times = tuple(waited.get(i, 0) + 1 for i in packs[len(packs) - 1].tolist())
        self.waiting, self.waited = (self.ready.pop(), times) if max(times) <= WAITS else ([], ())


def _lengths(group: Group) -> np.ndarray:
    return np.array([len(ids) for ids, _ in group.documents])


class StreamedBatches(IterableDataset):
    """Micro batches of one data-parallel rank, one after another, each with where its share is after it.

    Their loss_tokens are their own.
    """

    def __init__(
        self,
        stream: TokenStream,
        layout: Layout,
        micro_batch_size: int,
        rank: int,
        ranks: int,
        workers: int,
        shuffle: bool,
        seed: int,
    ):
        self.stream, self.layout, self.micro_batch_size = stream, layout, micro_batch_size
        self.rank, self.ranks, self.workers, self.shuffle, self.seed = rank, ranks, workers, shuffle, seed
        self._begin([Cursor(rank * workers + worker, ranks * workers) for worker in range(workers)], 0)

    def _begin(self, cursors: list[Cursor], turn: int) -> None:
        """At these cursors of this rank's workers, with the worker whose turn it is."""
        self.starts, self.turn = cursors, turn
        self.followers = {cursor.share: Follower(cursor) for cursor in cursors}

    def __iter__(self) -> Iterator[tuple[Batch, Given]]:
        worker: Any = get_worker_info()
        # The loader begins with its first process, whose share is then that of the worker whose turn it is.
        cursor = self.starts[(self.turn + (worker.id if worker else 0)) % self.workers]
        share = Share(self.stream, cursor, self.shuffle, self.seed)
        samples = _Samples(share, self.layout, self.seed)
        while True:
            micro_batch = [next(samples) for _ in range(self.micro_batch_size)]
            given, share.begun = samples.given(cursor.share, share.begun), []
            totals = Totals(total_weight(micro_batch), float(sum(map(len, micro_batch))))
            yield self.layout.lay(micro_batch, totals), given

    def position(self, given: int) -> dict[str, Any]:
        """As JSON, `given` micro batches after the beginning. What is each rank's own is in `cursors`."""
        return self._facts | {
            "ranks": self.ranks,
            "workers": self.workers,
            "turn": (self.turn + given) % self.workers,
            "packing": list(Packing.of(self.layout)),
        }

    def cursors(self) -> dict[str, np.ndarray]:
        """Of this rank's workers, after the micro batches that were reported to `followers`."""
        arrays = {}
        for worker, follower in enumerate(self.followers.values()):
            arrays |= follower.cursor.to_arrays(_name(self.rank, worker))
        return arrays

    def resume(self, position: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[str]:
        """Begin there. Returns notes for the user; raises ValueError where the data is another."""
        if differing := differences(position, self._facts):
            raise ValueError(f"the stream is not the checkpoint's: {differing}")
        ranks, workers = position["ranks"], position["workers"]
        now = {"ranks": self.ranks, "workers": self.workers, "packing": list(Packing.of(self.layout))}
        if not (differing := differences(position, now)):
            names = [_name(self.rank, worker) for worker in range(workers)]
            self._begin([Cursor.from_arrays(arrays, name) for name in names], position["turn"])
            return []
        names = [_name(rank, worker) for rank in range(ranks) for worker in range(workers)]
        cursors = [Cursor.from_arrays(arrays, name) for name in names]
        dealt = deal(cursors, len(self.stream.sources), self.ranks * self.workers)
        self._begin(dealt[self.rank * self.workers : (self.rank + 1) * self.workers], 0)
        return [f"the rows left of this epoch of the stream are dealt out anew ({differing})"]

    @property
    def _facts(self) -> dict[str, Any]:
        return self.stream.facts | {
            "--data_seed": self.seed,
            "--train_dataloader_shuffle": self.shuffle,
            "--shuffle_buffer_size": self.stream.shuffle_buffer,
        }


def _name(rank: int, worker: int) -> str:
    return f"data/{rank}/{worker}"
