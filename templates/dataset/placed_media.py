"""Images, videos and audios at their places in documents."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..formats.medium import MediaKind, Medium, json_source
from ..json_types import Json
from ..media.processor import MediaPlan

Document = tuple[np.ndarray, np.ndarray]  # token ids [length], loss weights [length]


KINDS: tuple[MediaKind, ...] = ("image", "image", "video", "audio")  # by the values of `_expansion_to_json`


class PlacedMedium(NamedTuple):
    """Image, video or audio of a document."""

    place: int  # index of its placeholder in the document; of its first token, once the document is expanded
    number: int  # among the media of its row, a video's for its sound; of several documents it is the same medium
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
        if medium.plan.expansion is not None and not medium.plan.is_sound:
            ids[medium.place : medium.place + medium.plan.length] = medium.plan.expansion
    return (ids, weights), placed


def collapse(ids: Sequence[int], media: Sequence[PlacedMedium], placeholders: Mapping[MediaKind, int]) -> list[int]:
    """Return the ids of an expanded document with one placeholder for each medium, as engines take it.

    placeholders: the token of each kind of media
    """
    collapsed: list[int] = []
    start = 0
    for medium in media:
        collapsed += [*ids[start : medium.place], placeholders[medium.plan.kind]]
        start = medium.place + medium.plan.length
    return [*collapsed, *ids[start:]]


def concatenated_media(lengths: Iterable[int], media: Iterable[Sequence[PlacedMedium]]) -> list[PlacedMedium]:
    """Return the media of documents, placed in their concatenation. lengths: number of ids of each document"""
    starts = accumulate(lengths, initial=0)
    return [
        medium._replace(place=medium.place + start)
        for start, document_media in zip(starts, media, strict=False)
        for medium in document_media
    ]


def media_to_json(media: Iterable[PlacedMedium]) -> list[Json]:
    """Return the media of a document as JSON, with their sources."""
    return [
        [
            *(placed.place, placed.number, [*placed.plan.grid], placed.plan.tokens),
            *(json_source(medium.source), medium.limits),
            *_expansion_to_json(placed.plan),
        ]
        for placed in media
        if (medium := placed.medium)
    ]


def _expansion_to_json(plan: MediaPlan) -> list[Json]:
    """Return nothing, or the expansion, of an image; time step and expansion of a video; three values of an audio."""
    ids: Json = None if plan.expansion is None else plan.expansion.tolist()
    if plan.kind == "audio":
        return [None, None, ids]
    if plan.kind == "video":
        return [plan.time_step, ids]
    return [] if ids is None else [ids]


def media_from_json(rows: Iterable[Any]) -> list[PlacedMedium]:
    """Restore the media of `media_to_json`."""
    media: list[PlacedMedium] = []
    for place, number, grid, tokens, source, limits, *others in rows:
        kind = KINDS[len(others)]
        time_step, expansion = others[0] if kind == "video" else 1, others[-1] if others else None
        ids = None if expansion is None else np.array(expansion, np.int32)
        plan = MediaPlan(kind, tuple(grid), tokens, time_step, expansion=ids)
        media.append(PlacedMedium(place, number, plan, Medium(kind, source, limits, plan.is_sound)))
    return media
