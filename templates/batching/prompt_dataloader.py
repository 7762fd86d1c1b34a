"""Prompts of all epochs in order, and the run's position in them."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..dataset.placed_media import Document, PlacedMedium
from ..dataset.samples import TokenizedSample
from ..dataset.store import TokenStore
from ..json_types import JsonObject
from .collator import BatchLayout
from .sample_order import Epochs


class Prompt(NamedTuple):
    """Prompt to complete, with its row's columns for reward functions."""

    source_row: str  # file and row number, for messages
    tokens: list[int]
    columns: JsonObject  # of the row; `messages` are those of the prompt
    media: Sequence[PlacedMedium] = ()  # images and videos of the prompt, placed in its expanded tokens
    reference_document: Document | None = None  # conversation with the answer in the row, if there is one
    reference_media: Sequence[PlacedMedium] = ()  # its images and videos


class Prompts:
    """Prompts of a run, the same on every rank.

    completions_per_prompt: a run counts its steps in completions
    pending_samples: completions of consumed prompts that are still to be trained on; set by the trainer
    """

    loss_tokens_are_local = False
    padding_share = None

    def __init__(self, store: TokenStore, *, completions_per_prompt: int, shuffle: bool, seed: int):
        self.store, self.completions_per_prompt, self.consumed, self.pending_samples = (
            store,
            completions_per_prompt,
            0,
            0,
        )
        self.epochs = Epochs(store, BatchLayout(stage="prompts"), shuffle, seed)

    @property
    def samples(self) -> int:
        """Number of completions trained on in an epoch."""
        return len(self.store) * self.completions_per_prompt

    def next_batch(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        positions = np.arange(self.consumed, self.consumed + count)
        self.consumed += count
        return [self._prompt(number) for number in self.epochs.numbers(positions).tolist()]

    def one_pass(self, count: int) -> Iterator[list[Prompt]]:
        """Yield every prompt once, in order, at most `count` at a time."""
        for start in range(0, len(self.store), count):
            yield [self._prompt(number) for number in range(start, min(start + count, len(self.store)))]

    def position(self) -> JsonObject:
        """Return the position after the consumed prompts."""
        return self.epochs.position(self.consumed) | {"waiting": self.pending_samples}

    @property
    def epoch(self) -> int:
        """Current epoch. The next one begins when all prompts of this one are trained on."""
        return (self._total_consumed() - -(-self.pending_samples // self.completions_per_prompt)) // len(self.store)

    def _total_consumed(self) -> int:
        """Return the number of prompts consumed since the start of the run, including before a resume."""
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
        """Return the number of completions left to train on, with pending ones, until `epochs` epochs are complete.

        A rollout may have consumed prompts beyond those epochs.
        """
        trained = self._total_consumed() * self.completions_per_prompt - self.pending_samples
        return max(math.ceil(epochs * self.samples - 1e-6) - trained, 0)

    def _prompt(self, number: int) -> Prompt:
        documents = self.store.row(number)
        sample = TokenizedSample(documents, self.store.label(number), number, media=self.store.media(number))
        columns, source_row = self.store.columns(number), self.store.source_row(number)
        prompt_media, *answer_media = sample.media_by_document
        prompt = Prompt(source_row, documents[0][0].tolist(), columns, prompt_media)
        if len(documents) == 1:
            return prompt
        return prompt._replace(reference_document=documents[1], reference_media=answer_media[0])
