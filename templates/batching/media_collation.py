"""Division of a micro batch's images, videos and audios among the ranks of a replica, and decoding of this rank's."""

import logging
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import torch

from ..dataset.placed_media import PlacedMedium
from ..formats.medium import MediaKind
from ..formats.schemas import UnusableRow
from ..media.image_rules import Layout
from ..media.processor import VisionProcessor
from .media_batch import CachedFeatures, MediaBatch

logger = logging.getLogger(__name__)

KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")  # in the order of MediaBatch


def assign_encoders(costs: Sequence[int], ranks: int) -> np.ndarray:
    """Return the rank that encodes each medium: the costliest first, each to the rank with the least to do.

    A pure function, so that all ranks agree. Graham 1969, longest processing time first.
    """
    encoders = np.zeros(len(costs), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        load, rank = heappop(loads)
        encoders[number] = rank
        heappush(loads, (load + costs[number], rank))
    return encoders


class MicroBatchMedia:
    """Media of a micro batch in the order of MediaBatch, with the values of those that this rank encodes.

    documents: media of each document, in order
    samples: sample of each document, within which media of a kind with the same number are one
    A document without loss leaves its whole sample without.
    Every rank checks the headers of all media, so that all agree on the documents without loss: those with a file that
    is missing, truncated or changed. A medium that still cannot be decoded is grey or silent. Only the rank that
    decodes it knows, so its document has no loss if that rank encodes alone, and keeps its loss if not.
    Raises ValueError for any of these with `strict`.
    """

    def __init__(
        self,
        vision: VisionProcessor,
        documents: Sequence[Sequence[PlacedMedium]],
        samples: Sequence[int],
        rank: int,
        ranks: int,
        strict: bool,
    ):
        self.vision, self.rank, self.ranks, self.strict = vision, rank, ranks, strict
        pairs = [(number, medium) for number, media in enumerate(documents) for medium in media]
        self._uses = sorted(pairs, key=lambda pair: KINDS.index(pair[1].plan.kind))  # stable
        keys: list[tuple[int, MediaKind, int]] = [
            (samples[document], medium.plan.kind, medium.number) for document, medium in self._uses
        ]
        first_uses: dict[tuple[int, MediaKind, int], PlacedMedium] = {}
        for key, (_, medium) in zip(keys, self._uses, strict=True):
            first_uses.setdefault(key, medium)
        self.media = [(sample, medium) for (sample, _, _), medium in first_uses.items()]
        indices = {key: index for index, key in enumerate(first_uses)}
        self._media_of_uses = [indices[key] for key in keys]
        self.encoders = assign_encoders([vision.encoding_cost(medium.plan) for _, medium in self.media], ranks)
        self.broken_samples: set[int] = set()
        self.broken_media = 0
        self._values: dict[MediaKind, list[np.ndarray]] = {kind: [] for kind in KINDS}
        self._layouts: list[Layout | None] = []  # per image and video
        self._keys: list[str] = []
        self._features: list[np.ndarray | None] = []  # one per medium that this rank encodes; None: not in the cache
        for (sample, medium), encoder in zip(self.media, self.encoders.tolist(), strict=True):
            self._read(sample, medium, is_encoded=encoder == rank)

    def _read(self, sample: int, placed: PlacedMedium, *, is_encoded: bool) -> None:
        plan, medium = placed.plan, placed.medium
        assert medium is not None
        values, reason, layout = None, "", None
        try:
            current = self.vision.plan(medium)
            layout = current.layout
            if not current.is_same(plan):
                reason = "has another size than when the data was prepared"
        except UnusableRow as error:
            reason = str(error)
        if reason:
            self.broken_samples.add(sample)
        if plan.kind != "audio":
            self._layouts.append(None if reason else layout)
        if not is_encoded:
            return
        if not reason:
            try:
                values = self.vision.decode(medium, plan)
            except UnusableRow as error:
                reason = str(error)
                if self.ranks == 1:
                    self.broken_samples.add(sample)
        if reason:
            name = medium.source if isinstance(medium.source, str) and len(medium.source) < 300 else "a row's"
            message = f"{name}: {medium.kind} cannot be used: {reason}"
            if self.strict:
                raise ValueError(f"{message} (--strict true)")
            logger.warning("%s. Its document has no loss", message)
            self.broken_media += 1
        self._values[plan.kind].append(self.vision.empty_values(plan) if values is None else values)
        if files := self.vision.feature_files:
            self._keys.append("" if values is None else files.key((*plan.grid, *(layout or ())), values))
            self._features.append(files.read(self._keys[-1]) if self._keys[-1] else None)

    def tokens(self, rows: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return row and position of each token of media, from row and start of each document: int64 [tokens]."""
        places = [
            starts[document] + medium.place + self.vision.visual_offsets(medium.plan) for document, medium in self._uses
        ]
        counts = [medium.plan.tokens for _, medium in self._uses]
        return np.repeat([rows[document] for document, _ in self._uses], counts), np.concatenate(places)

    def batch(self, context_ranks: np.ndarray, positions: np.ndarray) -> MediaBatch:
        plans = [medium.plan for _, medium in self.media]
        grids = [plan.grid for plan in plans if plan.kind != "audio"]
        return MediaBatch(
            grids=torch.tensor(grids, dtype=torch.int64).view(-1, 3),
            frames=torch.tensor([plan.grid[0] for plan in plans if plan.kind == "audio"], dtype=torch.int64),
            counts=torch.tensor([plan.tokens for plan in plans], dtype=torch.int64),
            encoders=torch.from_numpy(self.encoders),
            image_pixels=self._concatenated("image"),
            video_pixels=self._concatenated("video"),
            spectrograms=self._concatenated("audio"),
            uses=torch.tensor(self._media_of_uses, dtype=torch.int64),
            context_ranks=torch.from_numpy(context_ranks),
            positions=torch.from_numpy(positions),
            layouts=self._layout_tensor(),
            broken_media=self.broken_media,
            cached=self._cached(),
        )

    def _layout_tensor(self) -> torch.Tensor | None:
        if not any(self._layouts):
            return None
        return torch.tensor([layout or (0, 0, 0, 0) for layout in self._layouts], dtype=torch.int64)

    def _cached(self) -> CachedFeatures | None:
        if not self._keys:
            return None
        features = [values for values in self._features if values is not None]
        return CachedFeatures(
            self._keys,
            torch.tensor([values is not None for values in self._features]),
            torch.from_numpy(np.concatenate(features, axis=1) if features else np.empty((0, 0, 0), np.uint8)),
        )

    def _concatenated(self, kind: MediaKind) -> torch.Tensor:
        """Return the values of this rank's media of a kind: patches, or frames of spectrograms."""
        dtype = np.float32 if kind == "audio" else np.uint8
        empty = np.empty((0, self.vision.width(kind)), dtype)
        return torch.from_numpy(np.concatenate([empty, *self._values[kind]]))


def runs(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return row, first and last + 1 position of each run of consecutive positions of a row: int64 [runs, 3].

    rows, positions: of each visual token, in order
    """
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = (np.diff(rows) != 0) | (np.diff(positions) != 1)
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(rows)) - 1
    return np.stack((rows[firsts], positions[firsts], positions[lasts] + 1), axis=1).astype(np.int64)
