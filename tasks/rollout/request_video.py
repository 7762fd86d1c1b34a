"""Videos of prompts as engines take them: frames that training has sampled and resized."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from ...templates.dataset.placed_media import PlacedMedium
from ...templates.formats.schemas import UnusableRow
from ...templates.media.processor import MediaPlan, SampledVideo, VisionProcessor


@dataclass(frozen=True, eq=False)
class RequestVideo:
    """Video of a prompt. It is decoded once for all completions of the prompt.

    load: raises UnusableRow where the file cannot be used any more
    """

    plan: MediaPlan
    vision: VisionProcessor
    load: Callable[[], SampledVideo]

    @cached_property
    def sampled(self) -> SampledVideo:
        return self.load()

    @cached_property
    def patches(self) -> np.ndarray:
        """uint8 [patches, values]; grey where its file cannot be used any more, as in training."""
        try:
            return self.vision.video_patches(self.sampled)
        except UnusableRow:
            return self.vision.grey_patches("video", self.plan.grid)

    @property
    def frames(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Frames, uint8 [frames, height, width, 3], with the facts by which vLLM computes their times.

        Raises UnusableRow where its file cannot be used any more.
        """
        frames, indices, info = self.sampled
        facts = {"fps": info.fps, "total_num_frames": info.frames, "duration": info.frames / info.fps}
        facts |= {"frames_indices": indices, "do_sample_frames": False}
        return frames.permute(0, 2, 3, 1).contiguous().numpy(), facts


def training_video(placed: PlacedMedium, vision: VisionProcessor) -> RequestVideo:
    """Return a video with the frames that training uses."""
    return RequestVideo(placed.plan, vision, partial(_load, placed, vision))


def _load(placed: PlacedMedium, vision: VisionProcessor) -> SampledVideo:
    assert placed.medium is not None
    if vision.plan(placed.medium).grid != placed.plan.grid:
        raise UnusableRow("a video has changed")
    return vision.sampled_frames(placed.medium, placed.plan.grid)
