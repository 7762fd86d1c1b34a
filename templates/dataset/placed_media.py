"""Images and videos at their places in documents."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..formats.medium import Medium
from ..media.processor import MediaPlan

Document = tuple[np.ndarray, np.ndarray]  # token ids [length], loss weights [length]


class PlacedMedium(NamedTuple):
    """Image or video of a document."""

    place: int  # index of its placeholder in the document; of its first token, once the document is expanded
    number: int  # among the media of its row; of several documents it is the same medium
    plan: MediaPlan
    medium: Medium | None = None  # None: to be read from the row


def expand(ids: np.ndarray, weights: np.ndarray, media: Sequence[PlacedMedium]) -> tuple[Document, list[PlacedMedium]]:
    """Return a document with all tokens of its media in place of their placeholders, and the media's new places."""
    if not media:
        return (ids, weights), []
    repeats = np.ones(len(ids), np.int64)
    repeats[[medium.place for medium in media]] = [medium.plan.length for medium in media]
    starts = np.cumsum(repeats) - repeats
    ids, weights = np.repeat(ids, repeats), np.repeat(weights, repeats)
    placed = [medium._replace(place=int(starts[medium.place])) for medium in media]
    for medium in placed:
        if medium.plan.expansion is not None:
            ids[medium.place : medium.place + medium.plan.length] = medium.plan.expansion
    return (ids, weights), placed


def concatenated_media(lengths: Iterable[int], media: Iterable[Sequence[PlacedMedium]]) -> list[PlacedMedium]:
    """Return the media of documents, placed in their concatenation. lengths: number of ids of each document"""
    starts = accumulate(lengths, initial=0)
    return [
        medium._replace(place=medium.place + start)
        for start, document_media in zip(starts, media, strict=False)
        for medium in document_media
    ]
