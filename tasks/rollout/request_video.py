"""Videos of prompts as an engine in the process takes them: patches of training's frames."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...templates.dataset.placed_media import PlacedMedium
from ...templates.formats.schemas import UnusableRow
from ...templates.media.processor import VisionProcessor


@dataclass(frozen=True, eq=False)
class RequestVideo:
    """Video of a prompt, whose tokens the prompt has. It is decoded once for all completions of the prompt."""

    placed: PlacedMedium
    vision: VisionProcessor

    @cached_property
    def patches(self) -> np.ndarray:
        """uint8 [patches, values]; grey where its file cannot be used any more, as in training."""
        plan, medium = self.placed.plan, self.placed.medium
        assert medium is not None
        try:
            if self.vision.plan(medium).grid == plan.grid:
                return self.vision.patches(medium, plan.grid)
        except UnusableRow:
            pass
        return self.vision.grey_patches("video", plan.grid)
