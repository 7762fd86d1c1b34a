"""The samples of all epochs, one after another, and how to go on from any place among them.

A place is counted in samples, so that it means the same whatever the number of ranks and the batch size are. Where an
epoch goes on with packs of another kind (their length, or the padding of their documents, is another), it is a chain of
stretches: in each, the documents that those before it have left are packed anew. Which these are follows from the
stretches' kinds and numbers of samples alone.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..dataset.packing import Packs, pack
from ..dataset.store import TokenStore
from ..formats.schemas import ALONE
from .collator import Layout

LOOKED_INTO = 64  # documents whose tokens a fingerprint looks at


class Packing(NamedTuple):
    """What decides which documents make up a sample."""

    pack_length: int | None  # None: each document is a sample
    document_multiple: int

    @classmethod
    def of(cls, layout: Layout) -> "Packing":
        return cls(layout.pack_length, layout.document_multiple if layout.pack_length else 1)


class Stretch(NamedTuple):
    """A part of an epoch."""

    packing: Packing
    done: int  # samples


@dataclass(frozen=True)
class Samples:
    """Documents, or packs of them."""

    documents: Packs  # those of each sample
    lengths: np.ndarray  # int64 [samples], with padding
    weights: np.ndarray  # float64 [samples]

    @classmethod
    def of(cls, store: TokenStore, documents: np.ndarray, layout: Layout, packing: Packing, seed: int) -> "Samples":
        multiple = layout.document_multiple if packing.pack_length is None else packing.document_multiple
        lengths = store.padded_lengths(multiple, layout.beside)[documents]
        if packing.pack_length is None:
            return cls(Packs(documents, np.arange(len(documents) + 1)), lengths, store.weights[documents])
        if lengths.max(initial=0) > packing.pack_length:
            raise ValueError(
                f"--packing_length (or --max_length) {packing.pack_length} is too short for the longest sample: "
                f"its documents have {lengths.max()} tokens together"
            )
        packs = pack(lengths, packing.pack_length, seed)
        packs = Packs(documents[packs.items], packs.starts)
        weights = np.add.reduceat(store.weights[packs.items], packs.starts[:-1])
        return cls(packs, np.full(len(packs), packing.pack_length), weights)

    def __len__(self) -> int:
        return len(self.lengths)

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(
            self.documents + other.documents,
            np.concatenate([self.lengths, other.lengths]),
            np.concatenate([self.weights, other.weights]),
        )


class Epochs:
    """The samples of all epochs in order, from a position on: at first the beginning, or where `resume` puts it."""

    def __init__(self, store: TokenStore, layout: Layout, shuffle: bool, seed: int):
        self.store, self.layout, self.shuffle, self.seed = store, layout, shuffle, seed
        self.packing = Packing.of(layout)
        self.whole = self._samples(np.arange(len(store)), self.packing)
        self._begin(0, [], 0, self.whole)

    def _begin(self, epoch: int, before: list[Stretch], done: int, samples: Samples) -> None:
        """In this epoch, after these stretches, and after so many of these samples."""
        self.epoch, self.before, self.done, self.first = epoch, before, done, samples
        # By their numbers: those of a usual epoch, then those of the first, where it is none.
        self.all = self.whole + samples if before else self.whole
        self._order = -1, np.empty(0, np.int64)  # the epoch at hand and its order

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Numbers (in `all`) of the samples at these places, which are sorted and counted from the position on."""
        epochs, inside = self._epoch_of(places)
        return np.concatenate([self.order(int(epoch))[inside[epochs == epoch]] for epoch in np.unique(epochs)])

    def position(self, given: int) -> dict[str, Any]:
        """The position `given` samples further on."""
        epoch, done = (int(value) for value in self._epoch_of(np.int64(given)))
        before = self.before if epoch == self.epoch else []
        return self._fingerprint | {"epoch": epoch, "stretches": [*before, Stretch(self.packing, done)]}

    def resume(self, position: dict[str, Any]) -> list[str]:
        """Begin at this position. Returns notes for the user; raises ValueError where the data is another."""
        if differing := differences(position, self._fingerprint):
            raise ValueError(f"the training data is not the checkpoint's: {differing}")
        epoch, stretches = position["epoch"], [Stretch(Packing(*p), done) for p, done in position["stretches"]]
        *before, last = stretches
        if last.packing == self.packing:
            self._begin(epoch, before, last.done, self._left(epoch, before))
            return []
        before = [stretch for stretch in stretches if stretch.done]
        left = self._left(epoch, before)
        self._begin(epoch, before, 0, left)
        share = f"{len(left.documents.items):,} of {len(self.store):,} documents"
        return [f"samples are made up of documents otherwise than before: those left of this epoch ({share}) anew"]

    def until(self, epochs: float, given: int) -> int:
        """Samples from `given` further on until so many epochs are over. 0 where they are."""
        epoch, done = (int(value) for value in self._epoch_of(np.int64(given)))
        samples = self.first if epoch == self.epoch else self.whole
        left = len(samples.documents.items) / len(self.store)  # of this epoch's documents, when `samples` began
        wanted = min(max(epochs - epoch - (1 - left), 0), left) / left * len(samples)
        later = max(epochs - epoch - 1, 0) * len(self.whole)
        return max(math.ceil(wanted - done + later - 1e-6), 0)

    def _epoch_of(self, places: Any) -> tuple[Any, Any]:
        """The epoch of each place, and which sample of it (of the first epoch: of what is left of it) is there."""
        places = places + self.done
        more, inside = np.divmod(places - len(self.first), len(self.whole))
        ahead = places < len(self.first)
        return np.where(ahead, self.epoch, self.epoch + 1 + more), np.where(ahead, places, inside)

    def order(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            if epoch == self.epoch and self.before:
                order = len(self.whole) + self.permutation(len(self.first), epoch, len(self.before))
            else:
                order = self.permutation(len(self.whole), epoch)
            self._order = epoch, order
        return self._order[1]

    def permutation(self, samples: int, epoch: int, stretch: int = 0) -> np.ndarray:
        if not self.shuffle:
            return np.arange(samples)
        return np.random.default_rng([self.seed, epoch, stretch]).permutation(samples)

    def _left(self, epoch: int, before: list[Stretch]) -> Samples:
        """The samples after these stretches."""
        left = np.arange(len(self.store))
        for number, (packing, done) in enumerate(before):
            samples = self._samples(left, packing)
            gone = np.zeros(len(samples), bool)
            gone[self.permutation(len(samples), epoch, number)[:done]] = True
            left = np.sort(samples.documents.items[~np.repeat(gone, np.diff(samples.documents.starts))])
        return self._samples(left, self.packing) if before else self.whole

    def _samples(self, documents: np.ndarray, packing: Packing) -> Samples:
        return Samples.of(self.store, documents, self.layout, packing, self.seed)

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return {
            "documents": len(self.store),
            "tokens": int(self.store.lengths.sum()),
            "content": content(self.store),
            "--data_seed": self.seed,
            "--train_dataloader_shuffle": self.shuffle,
        }


def content(store: TokenStore) -> str:
    """Names the samples and their order by all lengths, weights and labels, and by the tokens of some."""
    digest = hashlib.blake2b(store.lengths.tobytes(), digest_size=16)
    digest.update(store.weights.tobytes())
    if store.stage not in ALONE:
        digest.update(store.labels.tobytes())
    for sample in np.linspace(0, len(store) - 1, LOOKED_INTO, dtype=np.int64).tolist():
        for ids, _ in store.row(sample):
            digest.update(ids.tobytes())
    return digest.hexdigest()


def differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What of `now` is otherwise in `then`, for a message; empty where nothing is."""
    return "; ".join(f"{name} was {then.get(name)}, is {now[name]}" for name in now if then.get(name) != now[name])
