"""Samples: as they are stored, and as they are collated."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .placed_media import Document, PlacedMedium

Runs = list[tuple[int, float]]  # loss weights, run-length encoded: (tokens, weight)


def decode_runs(runs: Runs) -> np.ndarray:
    """Return the loss weight of each token: float32 [length]."""
    tokens, weights = zip(*runs, strict=True)
    return np.repeat(np.array(weights, np.float32), tokens)


class EncodedSample(NamedTuple):
    """Sample to store: documents as (token ids, loss weights), and a label."""

    row: int  # number of its row in the source
    documents: list[tuple[np.ndarray, Runs]]
    label: list[float]
    columns: bytes = b""
    media: Sequence[Sequence[PlacedMedium]] = ()  # of each document, whose ids have a placeholder for each
    shared: int = 0  # pairs: tokens that both documents begin with and may share (shared_beginning.py)


class TokenizedSample(NamedTuple):
    """Sample to collate."""

    documents: list[Document]
    label: np.ndarray  # float32 [numbers]
    item: int = -1  # number in the store; -1 in a stream
    channel: int = -1  # number of its channel (--enable_channel_loss); -1: none
    media: Sequence[PlacedMedium] = ()  # placed in the concatenation of its expanded documents
    media_owner: int = -1  # samples with the same number have the same media, as completions of a prompt; -1: its own
    # Tokens before its documents; laid out once for consecutive samples with the same object. None: none.
    prefix: Document | None = None
    shared: int = 0  # tokens that its documents begin with and may share

    def with_prefix(self) -> "TokenizedSample":
        """Return the sample with the tokens that its documents share as their prefix."""
        if not self.shared:
            return self
        ids, weights = self.documents[0]
        rests = [(ids[self.shared :], weights[self.shared :]) for ids, weights in self.documents]
        return self._replace(documents=rests, prefix=(ids[: self.shared], weights[: self.shared]))

    @property
    def media_by_document(self) -> list[list[PlacedMedium]]:
        """Media of each document, placed in it."""
        ends = np.cumsum([len(ids) for ids, _ in self.documents])
        media: list[list[PlacedMedium]] = [[] for _ in self.documents]
        for medium in self.media:
            document = int(np.searchsorted(ends, medium.place, side="right"))
            start = int(ends[document]) - len(self.documents[document][0])
            media[document].append(medium._replace(place=medium.place - start))
        return media
