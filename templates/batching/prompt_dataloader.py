"""Prompts in the order of the epochs, with the position of the run among them."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..dataset.store import Document, TokenStore
from ..json_types import JsonObject
from .collator import BatchLayout
from .sample_order import Epochs


class Prompt(NamedTuple):
    """Prompt to complete, with the other columns of its row for reward functions."""

    source_row: str  # file and number of the row, for messages
    tokens: list[int]
    columns: JsonObject  # of the row; `messages` are the prompt's
    reference_document: Document | None = None  # conversation with the row's own answer, if it has one


class Prompts:
    """Prompts of a run, the same on every rank.

    samples_each: completions per prompt, by which the steps of a run are counted
    pending_samples: completions of consumed prompts that are not trained on yet; set by the trainer
    """

    loss_tokens_are_local = False
    padding_share = None

    def __init__(self, store: TokenStore, *, samples_each: int, shuffle: bool, seed: int):
        self.store, self.samples_each, self.consumed, self.pending_samples = store, samples_each, 0, 0
        self.epochs = Epochs(store, BatchLayout(stage="prompts"), shuffle, seed)

    @property
    def samples(self) -> int:
        """Completions that are trained on in an epoch."""
        return len(self.store) * self.samples_each

    def next_batch(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        positions = np.arange(self.consumed, self.consumed + count)
        self.consumed += count
        return [self._prompt(number) for number in self.epochs.numbers(positions).tolist()]

    def once(self, count: int) -> Iterator[list[Prompt]]:
        """Yield every prompt once, in order, at most `count` at a time."""
        for start in range(0, len(self.store), count):
            yield [self._prompt(number) for number in range(start, min(start + count, len(self.store)))]

    def position(self) -> JsonObject:
        """Return the position after the consumed prompts."""
        return self.epochs.position(self.consumed) | {"waiting": self.pending_samples}

    @property
    def epoch(self) -> int:
        """Epoch in training: the next one begins when all prompts of this one are trained on."""
        return (self._total_consumed() - -(-self.pending_samples // self.samples_each)) // len(self.store)

    def _total_consumed(self) -> int:
        """Return the prompts consumed since the run began, before a resume too."""
        position = self.epochs.position(self.consumed)
        return position["epoch"] * len(self.store) + sum(stretch.done for stretch in position["stretches"])

    def cursors(self) -> dict[str, np.ndarray]:
        return {}

    def resume(self, position: JsonObject, cursors: dict[str, np.ndarray]) -> list[str]:
        """Continue from a position. Raises ValueError with the differences if the data is different."""
        if "epoch" not in position:
            raise ValueError(
                "--streaming false: the checkpoint's training data was streamed. Resume it with the same task."
            )
        self.pending_samples = position.get("waiting", 0)
        return self.epochs.resume(position)

    def samples_until(self, epochs: float) -> int:
        """Return the completions left to train on until this many epochs are complete, pending ones included.

        A rollout may have consumed prompts beyond those epochs.
        """
        trained = self._total_consumed() * self.samples_each - self.pending_samples
        return max(math.ceil(epochs * self.samples - 1e-6) - trained, 0)

    def _prompt(self, number: int) -> Prompt:
        (ids, _), *answered = self.store.row(number)
        columns, source_row = self.store.columns(number), self.store.source_row(number)
        return Prompt(source_row, ids.tolist(), columns, next(iter(answered), None))
