"""Audios of prompts as engines take them: the samples and spectrograms of training."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from ...templates.dataset.placed_media import PlacedMedium
from ...templates.formats.schemas import UnusableRow
from ...templates.media.processor import MediaPlan, VisionProcessor


@dataclass(frozen=True, eq=False)
class RequestAudio:
    """Audio of a prompt. It is decoded once for all completions of the prompt.

    load: returns its samples at the model's rate, float32 [samples]; raises UnusableRow where its file is gone
    """

    plan: MediaPlan
    vision: VisionProcessor
    load: Callable[[], np.ndarray]

    @cached_property
    def samples(self) -> np.ndarray:
        """float32 [samples] at the model's rate; silence where its file cannot be used any more, as in training."""
        assert self.vision.audio is not None
        try:
            samples = self.load()
            if self.vision.audio.frames_of(len(samples)) == self.plan.grid[0]:
                return samples
        except UnusableRow:
            pass
        return self.vision.audio.silent_samples(self.plan.grid[0])

    @cached_property
    def spectrogram(self) -> np.ndarray:
        """float32 [frames, mel bins]"""
        assert self.vision.audio is not None
        return self.vision.audio.spectrogram_of(self.samples, self.plan.grid[0])


def training_audio(placed: PlacedMedium, vision: VisionProcessor) -> RequestAudio:
    """Return an audio with the samples that training uses."""
    assert placed.medium is not None
    assert vision.audio is not None
    return RequestAudio(placed.plan, vision, partial(vision.audio.samples, placed.medium))
