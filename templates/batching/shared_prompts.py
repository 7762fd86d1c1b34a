"""Prompts that several documents share in a row: which documents begin with the same prompt, and their packs.

A shared prompt is laid out once, without its last token: that token begins each completion, so that the first token of
each completion is predicted at a position of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..dataset.packing import pack_evenly

BUNDLE_SHARES = 1.0, 0.75, 0.5, 0.25  # largest part of a pack for one prompt and its completions


@dataclass
class SharedPrompts:
    """Documents of a training step by their prompts.

    tokens, weights: as in Sequences
    """

    tokens: Sequence[np.ndarray]
    weights: Sequence[np.ndarray]
    groups: np.ndarray = field(init=False)  # int64 [documents]: number of the prompt; -1: no other document has it
    saved: np.ndarray = field(init=False)  # int64 [documents]: tokens of the prompt that can be shared

    def __post_init__(self) -> None:
        first_trained = [int(trained[0]) if len(trained := np.flatnonzero(w[1:]) + 1) else 0 for w in self.weights]
        prompts = [ids[:first].tobytes() for ids, first in zip(self.tokens, first_trained, strict=True)]
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        groups = np.array([numbers[prompt] for prompt in prompts], np.int64)
        self.saved = np.maximum(np.array(first_trained, np.int64) - 1, 0)
        is_single = (np.bincount(groups, minlength=len(numbers)) == 1)[groups]
        self.groups = np.where(is_single | (self.saved == 0), -1, groups)

    @property
    def owners(self) -> list[int]:
        """Number of each document's prompt, counted from 0 without gaps."""
        keys = np.where(self.groups < 0, len(self.groups) + np.arange(len(self.groups)), self.groups)
        return np.unique(keys, return_inverse=True)[1].tolist()

    def shared_in(self, documents: Iterable[int]) -> list[tuple[int, bool]]:
        """Return the documents of a row with those of a prompt after each other, and whether they share it."""
        documents = list(documents)
        by_group: dict[int, list[int]] = {}
        for number in documents:
            group = int(self.groups[number])
            by_group.setdefault(-1 - number if group < 0 else group, []).append(number)
        return [(number, len(members) > 1) for members in by_group.values() for number in members]

    def length(self, documents: Iterable[int]) -> int:
        """Return the tokens of a row of these documents."""
        total, prompts = 0, set()
        for number, is_shared in self.shared_in(documents):
            is_repeated = is_shared and self.groups[number] in prompts
            total += len(self.tokens[number]) - (int(self.saved[number]) if is_repeated else 0)
            prompts.add(self.groups[number])
        return total

    def packings(self, capacity: int, multiple: int) -> Iterator[list[list[int]]]:
        """Yield several ways to pack the documents by `pack_evenly`, as the documents of each pack.

        Raises ValueError for a document longer than a pack.
        """
        # A pack is no longer than its share of the step, so that prompts which are fewer than packs are divided.
        longest = min(capacity, sum(map(len, self.tokens)) // multiple)
        for limit in dict.fromkeys(int(share * length) for length in (capacity, longest) for share in BUNDLE_SHARES):
            bundles = self._bundles(limit)
            packs = pack_evenly(np.array([self.length(bundle) for bundle in bundles], np.int64), capacity, multiple)
            yield [[document for bundle in members for document in bundles[bundle]] for members in packs]

    def _bundles(self, limit: int) -> list[list[int]]:
        """Divide the documents of each prompt into bundles of at most `limit` tokens; longer documents stay alone."""
        bundles = [[number] for number in np.flatnonzero(self.groups < 0).tolist()]
        for group in np.unique(self.groups[self.groups >= 0]):
            members = np.flatnonzero(self.groups == group).tolist()
            members.sort(key=lambda number: -len(self.tokens[number]))
            open_bundles: list[tuple[int, list[int]]] = []  # room left, documents
            for number in members:
                added = len(self.tokens[number]) - int(self.saved[number])
                place = next((i for i, (room, _) in enumerate(open_bundles) if added <= room), None)
                if place is None:
                    open_bundles.append((limit - len(self.tokens[number]), [number]))
                else:
                    room, bundle = open_bundles[place]
                    open_bundles[place] = room - added, [*bundle, number]
            bundles += [bundle for _, bundle in open_bundles]
        return bundles
