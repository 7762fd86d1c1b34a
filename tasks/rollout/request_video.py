"""Videos of prompts as engines in the process take them: frames that training has sampled and resized."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...templates.dataset.placed_media import PlacedMedium
from ...templates.formats.medium import Medium
from ...templates.formats.schemas import UnusableRow
from ...templates.media.processor import VisionProcessor


@dataclass(frozen=True, eq=False)
class RequestVideo:
    """Video of a prompt. It is decoded once for all completions of the prompt."""

    placed: PlacedMedium
    vision: VisionProcessor

    @cached_property
    def patches(self) -> np.ndarray:
        """uint8 [patches, values]; grey where its file cannot be used any more, as in training."""
        grid = self.placed.plan.grid
        try:
            if self.vision.plan(self._medium).grid == grid:
                return self.vision.patches(self._medium, grid)
        except UnusableRow:
            pass
        return self.vision.grey_patches("video", grid)

    @cached_property
    def frames(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Frames, uint8 [frames, height, width, 3], with the facts by which vLLM computes their times.

        Raises UnusableRow where its file cannot be used any more.
        """
        frames, indices, info = self.vision.sampled_frames(self._medium, self.placed.plan.grid)
        facts = {"fps": info.fps, "total_num_frames": info.frames, "duration": info.frames / info.fps}
        facts |= {"frames_indices": indices, "do_sample_frames": False}
        return frames.permute(0, 2, 3, 1).contiguous().numpy(), facts

    @property
    def _medium(self) -> Medium:
        assert self.placed.medium is not None
        return self.placed.medium
