"""Order of the samples of all epochs, and resumption at any position, also with a different packing.

Positions count samples, so they are valid for any number of ranks and any batch size. If the packing changes within an
epoch (the pack length, or the padding of documents), the epoch becomes a sequence of stretches. Each stretch packs the
documents that the previous stretches left. The stretches alone determine the remaining documents.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..dataset.packing import Packs, pack
from ..dataset.store import TokenStore
from ..formats.schemas import UNGROUPED
from ..json_types import JsonObject
from .collator import BatchLayout

GROUP = 1024  # samples that are sorted by length together; no batch size, which may change on resuming
FINGERPRINT_SAMPLES = 64  # samples whose tokens enter the fingerprint


class PackingRule(NamedTuple):
    """Rule by which documents are packed into samples."""

    pack_length: int | None  # None: each document is a sample
    document_multiple: int
    shares_prompts: bool = False  # never in checkpoints of earlier versions, which lack this field

    @classmethod
    def of(cls, layout: BatchLayout) -> "PackingRule":
        if layout.pack_length is None:
            return cls(None, 1)
        return cls(layout.pack_length, layout.document_multiple, layout.shares_prompts)


class Stretch(NamedTuple):
    """Part of an epoch with one packing rule."""

    rule: PackingRule
    done: int  # samples


@dataclass(frozen=True)
class Samples:
    """Samples to train on: documents, or packs of them."""

    documents: Packs  # of each sample
    lengths: np.ndarray  # int64 [samples], padding included
    weights: np.ndarray  # float64 [samples]

    @classmethod
    def of(cls, store: TokenStore, documents: np.ndarray, layout: BatchLayout, rule: PackingRule, seed: int):
        multiple, shares = rule.document_multiple, rule.shares_prompts
        if rule.pack_length is None:
            multiple, shares = layout.document_multiple, layout.shares_prompts
        lengths = store.padded_lengths(multiple, layout.has_mismatched)[documents]
        if shares:
            lengths = lengths - store.shared[documents]
        if rule.pack_length is None:
            return cls(Packs(documents, np.arange(len(documents) + 1)), lengths, store.weights[documents])
        if lengths.max(initial=0) > rule.pack_length:
            raise ValueError(
                f"--packing_length (or --max_length) {rule.pack_length}: too short for the longest sample, whose "
                f"documents have {lengths.max()} tokens together. Set a larger one, or a smaller --max_length."
            )
        packs = pack(lengths, rule.pack_length, seed)
        packs = Packs(documents[packs.items], packs.starts)
        weights = np.add.reduceat(store.weights[packs.items], packs.starts[:-1])
        return cls(packs, np.full(len(packs), rule.pack_length), weights)

    def __len__(self) -> int:
        return len(self.lengths)

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(
            self.documents + other.documents,
            np.concatenate([self.lengths, other.lengths]),
            np.concatenate([self.weights, other.weights]),
        )


class Epochs:
    """Samples of all epochs in order, from a position on, initially the start.

    by_length: whether shuffled samples are sorted by length within groups: those of a step are of similar length
    """

    def __init__(self, store: TokenStore, layout: BatchLayout, shuffle: bool, seed: int, *, by_length: bool = False):
        self.store, self.layout, self.shuffle, self.seed = store, layout, shuffle, seed
        self.by_length = by_length
        self.rule = PackingRule.of(layout)
        self.full_epoch = self._samples(np.arange(len(store)), self.rule)
        self._begin(0, [], 0, self.full_epoch)

    def _begin(self, epoch: int, stretches: list[Stretch], done: int, samples: Samples) -> None:
        """Set the position: `done` samples of the remaining `samples` after `stretches` of an epoch."""
        self.epoch, self.stretches, self.done, self.first_epoch = epoch, stretches, done, samples
        # Samples of a full epoch, then those of the first epoch if that is partial, with common numbers.
        self.all_samples = self.full_epoch + samples if stretches else self.full_epoch
        self._order = -1, np.empty(0, np.int64)  # cache: an epoch and its order

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers (in `all_samples`) of the samples at sorted positions, from the current one on."""
        epochs, offsets = self._locate(positions)
        return np.concatenate([self.order(int(epoch))[offsets[epochs == epoch]] for epoch in np.unique(epochs)])

    def position(self, consumed: int) -> JsonObject:
        """Return the position after `consumed` more samples."""
        epoch, done = (int(value) for value in self._locate(np.int64(consumed)))
        stretches = self.stretches if epoch == self.epoch else []
        return self._fingerprint | {"epoch": epoch, "stretches": [*stretches, Stretch(self.rule, done)]}

    def resume(self, position: JsonObject) -> list[str]:
        """Set the position. Return notes for the user; raise ValueError if the data is different."""
        if mismatch := differences({"--group_by_length": False} | position, self._fingerprint):
            raise ValueError(f"the training data is not the checkpoint's: {mismatch}")
        epoch, stretches = (
            position["epoch"],
            [Stretch(PackingRule(*rule), done) for rule, done in position["stretches"]],
        )
        *earlier, last = stretches
        if last.rule == self.rule:
            self._begin(epoch, earlier, last.done, self._remaining(epoch, earlier))
            return []
        earlier = [stretch for stretch in stretches if stretch.done]
        remaining = self._remaining(epoch, earlier)
        self._begin(epoch, earlier, 0, remaining)
        share = f"{len(remaining.documents.items):,} of {len(self.store):,} documents"
        return [f"the packing has changed: the documents left of this epoch ({share}) are packed anew"]

    def samples_until(self, epochs: float, consumed: int) -> int:
        """Return the number of samples from `consumed` until `epochs` epochs are complete, at least 0."""
        epoch, done = (int(value) for value in self._locate(np.int64(consumed)))
        samples = self.first_epoch if epoch == self.epoch else self.full_epoch
        share = len(samples.documents.items) / len(self.store)  # share of the epoch's documents that `samples` have
        in_epoch = min(max(epochs - epoch - (1 - share), 0), share) / share * len(samples)
        in_later_epochs = max(epochs - epoch - 1, 0) * len(self.full_epoch)
        return max(math.ceil(in_epoch - done + in_later_epochs - 1e-6), 0)

    def _locate(self, positions: np.ndarray | np.int64) -> tuple[np.ndarray, np.ndarray]:
        """Return the epoch of each position, and its offset there (in the first epoch: among the remaining)."""
        absolute = positions + self.done
        full_epochs, offsets = np.divmod(absolute - len(self.first_epoch), len(self.full_epoch))
        in_first = absolute < len(self.first_epoch)
        return np.where(in_first, self.epoch, self.epoch + 1 + full_epochs), np.where(in_first, absolute, offsets)

    def order(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            if epoch == self.epoch and self.stretches:
                order = len(self.full_epoch) + self.permutation(self.first_epoch, epoch, len(self.stretches))
            else:
                order = self.permutation(self.full_epoch, epoch)
            self._order = epoch, order
        return self._order[1]

    def permutation(self, samples: Samples, epoch: int, stretch: int = 0) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(samples))
        order = np.random.default_rng([self.seed, epoch, stretch]).permutation(len(samples))
        if not self.by_length or len(samples.documents.items) > len(samples):  # packs
            return order
        return sort_groups(order, self._lengths[samples.documents.items])

    @cached_property
    def _lengths(self) -> np.ndarray:
        """Lengths without padding, which depends on the layout."""
        return self.store.padded_lengths(1, self.layout.has_mismatched)

    def _remaining(self, epoch: int, stretches: list[Stretch]) -> Samples:
        """Return the samples that follow these stretches."""
        documents = np.arange(len(self.store))
        for number, (rule, done) in enumerate(stretches):
            samples = self._samples(documents, rule)
            is_done = np.zeros(len(samples), bool)
            is_done[self.permutation(samples, epoch, number)[:done]] = True
            documents = np.sort(samples.documents.items[~np.repeat(is_done, np.diff(samples.documents.starts))])
        return self._samples(documents, self.rule) if stretches else self.full_epoch

    def _samples(self, documents: np.ndarray, rule: PackingRule) -> Samples:
        return Samples.of(self.store, documents, self.layout, rule, self.seed)

    @cached_property
    def _fingerprint(self) -> JsonObject:
        return {
            "documents": len(self.store),
            "tokens": int(self.store.lengths.sum()),
            "content": fingerprint(self.store),
            "--data_seed": self.seed,
            "--train_dataloader_shuffle": self.shuffle,
            "--group_by_length": self.by_length,
        }


def sort_groups(order: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sort groups of successive samples by length, longest first; the longest sample of all becomes the first.

    As transformers' `LengthGroupedSampler`: a step that needs too much memory is seen at once.
    """
    size = max(min(GROUP, len(order) // 4), 1)
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    groups = [group[np.argsort(-lengths[group], kind="stable")] for group in groups]
    longest = int(np.argmax([lengths[group[0]] for group in groups]))
    groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
    return np.concatenate(groups)


def fingerprint(store: TokenStore) -> str:
    """Return a hash of all lengths, weights and labels in order, and of the tokens of some samples."""
    digest = hashlib.blake2b(store.lengths.tobytes(), digest_size=16)
    digest.update(store.weights.tobytes())
    if store.stage not in UNGROUPED:
        digest.update(store.labels.tobytes())
    for sample in np.linspace(0, len(store) - 1, FINGERPRINT_SAMPLES, dtype=np.int64).tolist():
        for ids, _ in store.row(sample):
            digest.update(ids.tobytes())
    return digest.hexdigest()


def differences(saved: JsonObject, current: JsonObject) -> str:
    """Return the entries of `current` that differ from `saved`, as text for a message; "" if they are equal."""
    return "; ".join(
        f"{key} was {saved.get(key)}, is {value}" for key, value in current.items() if saved.get(key) != value
    )
