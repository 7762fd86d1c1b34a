"""Cursors of the readers of a stream, and their redistribution to another number of readers.

Each worker of each data-parallel rank reads a shard of the rows, in lanes: one row of each lane in turn, normally one
lane per source. A Cursor holds what a shard has yet to yield: the names of documents that it has read but not yielded,
and the lanes left to read.
"""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

LANES = 4  # minimum of lanes per source and shard, if shards cannot have equal numbers of lanes


class StreamLane(NamedTuple):
    """Every `step`-th row from row `start` on, of shard `shard` of `shards` of a source."""

    epoch: int
    source: int
    shard: int
    shards: int
    start: int = 0
    step: int = 1

    def split(self, parts: int) -> "list[StreamLane]":
        """Return `parts` lanes that share these rows in turn."""
        return [self._replace(start=self.start + part * self.step, step=self.step * parts) for part in range(parts)]


class DocumentName(NamedTuple):
    """Name of a document: piece `piece` of row `row` of a shard of a source."""

    epoch: int
    source: int
    shard: int
    shards: int
    row: int
    piece: int


@dataclass(frozen=True)
class Cursor:
    """State of the reader of a shard.

    `documents` holds, in order, the documents of ready packs, those that wait to be packed, and the rest of the block.
    """

    shard: int
    shards: int
    epoch: int = 0
    block: int = 0  # number of the next block to read in this epoch
    lanes: tuple[StreamLane, ...] = ()  # lanes of this epoch, in turn, and of later epochs before `regular_from`
    regular_from: int = 0  # first epoch that is read from its start, in one lane per source
    documents: np.ndarray = field(default_factory=lambda: np.empty((0, len(DocumentName._fields)), np.int64))
    packs: tuple[int, ...] = ()  # documents of each ready pack
    waiting: tuple[int, ...] = ()  # how often the packer left over each waiting document

    def lanes_of(self, epoch: int, sources: int) -> list[StreamLane]:
        """Return the lanes of an epoch that the shard has yet to read."""
        if epoch >= self.regular_from:
            return [StreamLane(epoch, source, self.shard, self.shards) for source in range(sources)]
        return [lane for lane in self.lanes if lane.epoch == epoch]

    def to_arrays(self, name: str) -> dict[str, np.ndarray]:
        numbers = [self.shard, self.shards, self.epoch, self.block, self.regular_from]
        return {
            f"{name}/numbers": np.array(numbers, np.int64),
            f"{name}/lanes": np.array(self.lanes, np.int64).reshape(-1, len(StreamLane._fields)),
            f"{name}/documents": self.documents,
            f"{name}/packs": np.array(self.packs, np.int64),
            f"{name}/waiting": np.array(self.waiting, np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], name: str) -> "Cursor":
        """Read a cursor. Raises ValueError if it is missing."""
        if f"{name}/numbers" not in arrays:
            raise ValueError(f"the checkpoint is incomplete: it has no {name}, the position of a reader of the stream")
        lanes = tuple(StreamLane(*lane) for lane in arrays[f"{name}/lanes"].tolist())
        packs, waiting = (tuple(arrays[f"{name}/{key}"].tolist()) for key in ("packs", "waiting"))
        shard, shards, epoch, block, regular_from = arrays[f"{name}/numbers"].tolist()
        return cls(shard, shards, epoch, block, lanes, regular_from, arrays[f"{name}/documents"], packs, waiting)


@dataclass(frozen=True)
class Block:
    """Documents that a shard has read and shuffled."""

    first: int  # number of its first document, in the order in which the shard reads
    cursor: Cursor  # state before any of them is yielded


@dataclass(frozen=True)
class CursorUpdate:
    """State of a shard after a micro batch, sent with it. Documents are identified by their numbers."""

    shard: int
    blocks: list[Block]  # started since the previous micro batch
    pending: tuple[int, ...]  # documents in ready packs, one pack after another, then the waiting ones
    packs: tuple[int, ...]  # documents of each ready pack
    waiting: tuple[int, ...]  # how often the packer left over each waiting document
    next_document: int


class CursorTracker:
    """Cursor of a shard after the micro batches consumed so far; its worker process runs ahead of them."""

    def __init__(self, cursor: Cursor):
        self.blocks = [Block(0, cursor)]
        pending = sum(cursor.packs) + len(cursor.waiting)
        self.last = CursorUpdate(cursor.shard, [], tuple(range(pending)), cursor.packs, cursor.waiting, pending)

    def update(self, update: CursorUpdate) -> None:
        self.last = update
        self.blocks += update.blocks
        oldest = min(update.pending, default=update.next_document)
        while len(self.blocks) > 1 and self.blocks[1].first <= oldest:
            del self.blocks[0]

    @property
    def cursor(self) -> Cursor:
        block, last = self.blocks[-1], self.last
        names = np.concatenate([block.cursor.documents for block in self.blocks])
        pending = names[np.array(last.pending, np.int64) - self.blocks[0].first]
        unread = block.cursor.documents[last.next_document - block.first :]
        return replace(
            block.cursor, documents=np.concatenate([pending, unread]), packs=last.packs, waiting=last.waiting
        )


def reshard(cursors: list[Cursor], sources: int, shards: int) -> list[Cursor]:
    """Redistribute what these shards have yet to yield to another number of shards.

    Epochs that only some shards have completed come first, with their remaining rows.
    """
    first, regular_from = min(cursor.epoch for cursor in cursors), max(cursor.regular_from for cursor in cursors)
    lanes: list[list[StreamLane]] = [[] for _ in range(shards)]
    for epoch in range(first, regular_from):
        remaining = [lane for cursor in cursors for lane in cursor.lanes_of(epoch, sources)]
        for source in range(sources):
            parts = _split_evenly([lane for lane in remaining if lane.source == source], shards)
            for shard in range(shards):
                lanes[shard] += parts[shard::shards]
    documents = np.concatenate([cursor.documents for cursor in cursors])
    return [
        Cursor(
            shard,
            shards,
            epoch=first,
            lanes=tuple(lanes[shard]),
            regular_from=regular_from,
            documents=documents[shard::shards],
        )
        for shard in range(shards)
    ]


def _split_evenly(lanes: list[StreamLane], shards: int) -> list[StreamLane]:
    """Split lanes so that shards get similar numbers. Each lane costs a pass over its source."""
    if not lanes:
        return []
    parts = min(shards // math.gcd(len(lanes), shards), -(-LANES * shards // len(lanes)))
    return [part for lane in lanes for part in lane.split(parts)]
