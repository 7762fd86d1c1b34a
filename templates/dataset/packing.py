"""Best-fit-decreasing packing from a table of lengths.

The algorithm takes items from the longest to the shortest, and puts each into the fullest pack with room for it
(Johnson 1973; for language models Ding et al. 2024, arXiv:2404.10830). Lengths are small integers, so packs with the
same room left are interchangeable: items of the same length are placed together, a group of packs at a time.
A million items take a second or less in plain Python and numpy.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packs:
    """Items of each pack. Pack i holds `items[starts[i] : starts[i + 1]]`, the longest first."""

    items: np.ndarray  # int64 [items], a permutation of the items' numbers
    starts: np.ndarray  # int64 [packs + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.items[self.starts[i] : self.starts[i + 1]]

    def __add__(self, other: "Packs") -> "Packs":
        """Concatenate packs."""
        return Packs(
            np.concatenate([self.items, other.items]),
            np.concatenate([self.starts, len(self.items) + other.starts[1:]]),
        )


def pack(lengths: np.ndarray, capacity: int, seed: int = 0) -> Packs:
    """Pack items of `lengths` (integers from 1 to `capacity`) into packs of `capacity`.

    The same arguments give the same packs. The seed chooses among items of equal length.
    Raises ValueError if an item is longer than a pack.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) == 0:
        return Packs(np.empty(0, np.int64), np.zeros(1, np.int64))
    if lengths.max() > capacity:
        raise ValueError(f"a sample of {lengths.max()} tokens does not fit into a pack of {capacity}")
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]  # longest first, ties in random order
    values, counts = np.unique(lengths, return_counts=True)

    pack_of = np.empty(len(lengths), np.int64)  # by position in `order`
    rooms: list[int] = []  # room left in open packs, sorted
    open_packs: dict[int, list[np.ndarray]] = {}  # room -> numbers of the packs with exactly this room
    packs = position = 0

    def fill(packs_with_room: np.ndarray, room: int, length: int, count: int) -> None:
        """Put `count` items of `length` into these packs, filling one pack before the next."""
        nonlocal position
        per_pack = room // length
        used = -(-count // per_pack)
        pack_of[position : position + count] = np.repeat(packs_with_room[:used], per_pack)[:count]
        position += count
        last = count - (used - 1) * per_pack  # items in the last pack used
        keep_open(packs_with_room[: used - 1], room - per_pack * length)
        keep_open(packs_with_room[used - 1 : used], room - last * length)
        keep_open(packs_with_room[used:], room)

    def keep_open(numbers: np.ndarray, room: int) -> None:
        if len(numbers) and room:
            if room not in open_packs:
                insort(rooms, room)
                open_packs[room] = []
            open_packs[room].append(numbers)

    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            tightest = bisect_left(rooms, length)
            if tightest < len(rooms):
                room = rooms.pop(tightest)
                numbers = np.concatenate(open_packs.pop(room))
            else:
                room = capacity
                numbers = np.arange(packs, packs + -(-count // (capacity // length)))
                packs += len(numbers)
            placed = min(count, len(numbers) * (room // length))
            fill(numbers, room, length, placed)
            count -= placed

    by_pack = np.argsort(pack_of, kind="stable")
    return Packs(order[by_pack], np.concatenate([[0], np.cumsum(np.bincount(pack_of, minlength=packs))]))


def pack_evenly(lengths: np.ndarray, capacity: int, multiple: int = 1) -> Packs:
    """Pack items into few packs of about equal lengths.

    They are at most as many as `pack` needs, rounded up to a multiple of `multiple`.
    Raises ValueError if an item is longer than `capacity`.
    """
    packs = pack(lengths, capacity)
    if len(packs) == 0:
        return packs
    most = -(-len(packs) // multiple) * multiple
    least = max(int(np.max(lengths)), -(-int(np.sum(lengths)) // most))
    # A shorter capacity can need fewer packs than a longer one, so this one is good and need not be the best.
    offset = bisect_left(range(least, capacity), True, key=lambda length: len(pack(lengths, length)) <= most)
    return pack(lengths, least + offset)


def round_up(lengths: np.ndarray, multiple: int) -> np.ndarray:
    return -(-lengths // multiple) * multiple
