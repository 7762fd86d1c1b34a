"""What is to be answered: prompts in the order of the epochs, and where a run is among them."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..dataset.store import Document, TokenStore
from .collator import Layout
from .sample_order import Epochs


class Prompt(NamedTuple):
    """What is to be answered, and what the row says besides, for those who judge the answers."""

    place: str  # of the row, to name it in a message
    tokens: list[int]
    columns: dict[str, Any]  # of the row; `messages` are the prompt's
    answered: Document | None = None  # the conversation with the row's own answer, where there is one


class Prompts:
    """The prompts of a run, the same on every rank.

    `samples_each`: how many samples training makes of each, by which a run's steps are counted. `waiting`: of those,
    the ones of prompts that were taken which training has yet to come to; who trains says so.
    """

    loss_tokens_are_local = False
    padding_share = None

    def __init__(self, store: TokenStore, *, samples_each: int, shuffle: bool, seed: int):
        self.store, self.samples_each, self.given, self.waiting = store, samples_each, 0, 0
        self.epochs = Epochs(store, Layout(stage="prompts"), shuffle, seed)

    @property
    def samples(self) -> int:
        """That training makes of an epoch."""
        return len(self.store) * self.samples_each

    def take(self, prompts: int) -> list[Prompt]:
        """The next ones."""
        places = np.arange(self.given, self.given + prompts)
        self.given += prompts
        return [self._prompt(number) for number in self.epochs.numbers(places).tolist()]

    def once(self, prompts: int) -> Iterator[list[Prompt]]:
        """Every prompt once, in order, so many at a time."""
        for start in range(0, len(self.store), prompts):
            yield [self._prompt(number) for number in range(start, min(start + prompts, len(self.store)))]

    def position(self) -> dict[str, Any]:
        """After those given so far, as JSON."""
        return self.epochs.position(self.given) | {"waiting": self.waiting}

    @property
    def epoch(self) -> int:
        """That training is in: it ends when all its prompts have been trained on."""
        return (self._taken() - -(-self.waiting // self.samples_each)) // len(self.store)

    def _taken(self) -> int:
        """Prompts, since the run began."""
        position = self.epochs.position(self.given)
        return position["epoch"] * len(self.store) + sum(stretch.done for stretch in position["stretches"])

    def cursors(self) -> dict[str, np.ndarray]:
        return {}

    def resume(self, position: dict[str, Any], cursors: dict[str, np.ndarray]) -> list[str]:
        """Go on from a position. Raises ValueError, saying what differs, where the data is another."""
        if "epoch" not in position:
            raise ValueError("the checkpoint's training data was streamed: --streaming must be what it was")
        self.waiting = position.get("waiting", 0)
        return self.epochs.resume(position)

    def samples_until(self, epochs: float) -> int:
        """Samples from the position on, and of those that wait, until so many epochs are over: a generation may have
        taken prompts beyond them."""
        done = self._taken() * self.samples_each - self.waiting
        return max(math.ceil(epochs * self.samples - 1e-6) - done, 0)

    def _prompt(self, number: int) -> Prompt:
        (ids, _), *answered = self.store.row(number)
        return Prompt(self.store.place(number), ids.tolist(), self.store.columns(number), next(iter(answered), None))
