"""Audios of prompts as engines take them: the spectrograms of training."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...templates.dataset.placed_media import PlacedMedium
from ...templates.formats.medium import Medium
from ...templates.formats.schemas import UnusableRow
from ...templates.media.processor import MediaPlan, VisionProcessor


@dataclass(frozen=True, eq=False)
class RequestAudio:
    """Audio of a prompt. It is decoded once for all completions of the prompt."""

    plan: MediaPlan
    vision: VisionProcessor
    medium: Medium

    @cached_property
    def spectrogram(self) -> np.ndarray:
        """float32 [frames, mel bins]; of silence where its file cannot be used any more, as in training."""
        try:
            return self.vision.decode(self.medium, self.plan)
        except UnusableRow:
            return self.vision.empty_values(self.plan)


def training_audio(placed: PlacedMedium, vision: VisionProcessor) -> RequestAudio:
    """Return an audio with the spectrogram that training uses."""
    assert placed.medium is not None
    return RequestAudio(placed.plan, vision, placed.medium)
