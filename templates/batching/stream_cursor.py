"""Where the readers of a stream are, and how their rows are dealt out to another number of readers.

Each worker of each data-parallel rank reads a share of the rows: lanes, one row of each in turn, in a usual epoch one
lane of each source. All that a share has yet to give follows from a Cursor: the documents that it has read and not yet
given, by name alone, and the lanes that it goes on reading.
"""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

LANES = 4  # of each source, that shares are to have at least where they cannot all have the same number


class Lane(NamedTuple):
    """Every `step`-th row, from row number `start` on, of those that a source gives share `share` of `shares`."""

    epoch: int
    source: int
    share: int
    shares: int
    start: int = 0
    step: int = 1

    def cut(self, parts: int) -> "list[Lane]":
        """Lanes of these rows, each with every `parts`-th."""
        return [self._replace(start=self.start + part * self.step, step=self.step * parts) for part in range(parts)]


class Named(NamedTuple):
    """A document: piece number `piece` of what row number `row` of a source's share gives."""

    epoch: int
    source: int
    share: int
    shares: int
    row: int
    piece: int


@dataclass(frozen=True)
class Cursor:
    """Where a share is."""

    share: int
    shares: int
    epoch: int = 0
    block: int = 0  # the number of the block that it reads next in this epoch
    lanes: tuple[Lane, ...] = ()  # of this epoch, in turn, and of those before `usual`
    usual: int = 0  # from this epoch on it has one lane of each source, from its beginning
    documents: np.ndarray = field(default_factory=lambda: np.empty((0, len(Named._fields)), np.int64))
    packs: tuple[int, ...] = ()  # how many of these documents, from the first on, make up a pack each
    waiting: tuple[int, ...] = ()  # of the documents after them, how often each has waited to be packed
    # What is left of `documents` is the rest of the block at hand.

    def lanes_of(self, epoch: int, sources: int) -> list[Lane]:
        """What the share has yet to read of an epoch."""
        if epoch >= self.usual:
            return [Lane(epoch, source, self.share, self.shares) for source in range(sources)]
        return [lane for lane in self.lanes if lane.epoch == epoch]

    def to_arrays(self, name: str) -> dict[str, np.ndarray]:
        numbers = [self.share, self.shares, self.epoch, self.block, self.usual]
        return {
            f"{name}/numbers": np.array(numbers, np.int64),
            f"{name}/lanes": np.array(self.lanes, np.int64).reshape(-1, len(Lane._fields)),
            f"{name}/documents": self.documents,
            f"{name}/packs": np.array(self.packs, np.int64),
            f"{name}/waiting": np.array(self.waiting, np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], name: str) -> "Cursor":
        """Raises ValueError where there is none of this name."""
        if f"{name}/numbers" not in arrays:
            raise ValueError(f"the checkpoint has no {name}, where a reader of the stream was: it is not whole")
        lanes = tuple(Lane(*lane) for lane in arrays[f"{name}/lanes"].tolist())
        packs, waiting = (tuple(arrays[f"{name}/{what}"].tolist()) for what in ("packs", "waiting"))
        share, shares, epoch, block, usual = arrays[f"{name}/numbers"].tolist()
        return cls(share, shares, epoch, block, lanes, usual, arrays[f"{name}/documents"], packs, waiting)


@dataclass(frozen=True)
class Block:
    """Documents that a share has read and shuffled."""

    first: int  # the number of its first document: a share counts what it reads
    cursor: Cursor  # where the share is before it gives any of them


@dataclass(frozen=True)
class Given:
    """What comes with a micro batch: where its share is after it. Documents are named by their numbers."""

    share: int
    blocks: list[Block]  # that the share has begun since the micro batch before
    pending: tuple[int, ...]  # documents in packs that are ready, one after another, then those that wait
    packs: tuple[int, ...]  # the sizes of the ready packs
    waiting: tuple[int, ...]  # how often each that waits has done so
    following: int  # the next document that the share takes


class Follower:
    """Where a share is, by what has been given of it: its process is further on, for it works ahead."""

    def __init__(self, cursor: Cursor):
        self.blocks = [Block(0, cursor)]
        taken = sum(cursor.packs) + len(cursor.waiting)
        self.given = Given(cursor.share, [], tuple(range(taken)), cursor.packs, cursor.waiting, taken)

    def follow(self, given: Given) -> None:
        self.given = given
        self.blocks += given.blocks
        oldest = min(given.pending, default=given.following)
        while len(self.blocks) > 1 and self.blocks[1].first <= oldest:
            del self.blocks[0]

    @property
    def cursor(self) -> Cursor:
        now, given = self.blocks[-1], self.given
        names = np.concatenate([block.cursor.documents for block in self.blocks])
        pending = names[np.array(given.pending, np.int64) - self.blocks[0].first]
        rest = now.cursor.documents[given.following - now.first :]
        return replace(
            now.cursor,
            documents=np.concatenate([pending, rest]),
            packs=given.packs,
            waiting=given.waiting,
        )


def deal(cursors: list[Cursor], sources: int, shares: int) -> list[Cursor]:
    """All that these shares have yet to give, to another number of shares.

    Epochs that some of them are through and others not come first, each with what is left of it.
    """
    first, usual = min(cursor.epoch for cursor in cursors), max(cursor.usual for cursor in cursors)
    lanes: list[list[Lane]] = [[] for _ in range(shares)]
    for epoch in range(first, usual):
        left = [lane for cursor in cursors for lane in cursor.lanes_of(epoch, sources)]
        for source in range(sources):
            parts = _even([lane for lane in left if lane.source == source], shares)
            for share in range(shares):
                lanes[share] += parts[share::shares]
    documents = np.concatenate([cursor.documents for cursor in cursors])
    return [
        Cursor(
            share,
            shares,
            epoch=first,
            lanes=tuple(lanes[share]),
            usual=usual,
            documents=documents[share::shares],
        )
        for share in range(shares)
    ]


def _even(lanes: list[Lane], shares: int) -> list[Lane]:
    """Lanes of which each share can have the same number, or about: each is a pass over its source."""
    if not lanes:
        return []
    parts = min(shares // math.gcd(len(lanes), shares), -(-LANES * shares // len(lanes)))
    return [part for lane in lanes for part in lane.cut(parts)]
