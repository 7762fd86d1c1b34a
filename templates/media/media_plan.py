"""Sizes of images, videos and audios for a model."""

from typing import NamedTuple

import numpy as np

from ..formats.medium import MediaKind
from .image_rules import Grid, Layout


class MediaPlan(NamedTuple):
    """Size of an image, video or audio for the model."""

    kind: MediaKind
    grid: Grid  # for an audio: frames of its spectrogram, 1 and 1
    tokens: int
    time_step: int = 1  # between the positions of a video's patches of time
    # int32: ids that replace the placeholder; None: `tokens` placeholders. Of the sound of a video: the places of its
    # tokens, counted from the end of the video's ids, among which they are
    expansion: np.ndarray | None = None
    # Of an image, as long as its header was read in this process; stored plans lack them.
    size: tuple[int, int] | None = None  # height and width before resizing
    layout: Layout | None = None

    def is_same(self, other: "MediaPlan") -> bool:
        """Return whether a medium has the same tokens and patches by another plan."""
        if (self.grid, self.tokens) != (other.grid, other.tokens):
            return False
        if self.expansion is None or other.expansion is None:
            return self.expansion is other.expansion
        return np.array_equal(self.expansion, other.expansion)

    @property
    def is_sound(self) -> bool:
        """Return whether it is the sound of a video, behind whose placeholder its own is replaced by nothing."""
        return self.kind == "audio" and self.expansion is not None

    @property
    def length(self) -> int:
        """Number of ids that replace the placeholder."""
        if self.is_sound:
            return 0
        return self.tokens if self.expansion is None else len(self.expansion)

    def expanded(self, placeholder: int) -> np.ndarray:
        """Return the ids that replace the placeholder: int32 [length]."""
        if self.is_sound:
            return np.empty(0, np.int32)
        return np.full(self.tokens, placeholder, np.int32) if self.expansion is None else self.expansion
