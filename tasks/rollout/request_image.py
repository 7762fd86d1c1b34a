"""Images of prompts as engines take them: the pixels that training uses, and the limits to which they are resized."""

from functools import cached_property
from typing import TYPE_CHECKING

from ...templates.dataset.placed_media import PlacedMedium
from ...templates.formats.schemas import UnusableRow
from ...templates.media.images import open_image
from ...templates.media.processor import VisionProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

GREY = 128, 128, 128


class RequestImage:
    """Image of a prompt. It is decoded once for all completions of the prompt, where an engine needs it.

    min_pixels, max_pixels: limits of its area after resizing
    """

    def __init__(self, placed: PlacedMedium, vision: VisionProcessor):
        assert placed.medium is not None
        limits = vision.limits.of_row(placed.medium.limits)
        self.min_pixels, self.max_pixels = limits.min_pixels, limits.max_pixels
        self._placed, self._vision = placed, vision

    @cached_property
    def pixels(self) -> "Image":
        """RGB, of the original size. Grey where the file cannot be used any more, as in training."""
        from PIL import Image

        plan, medium = self._placed.plan, self._placed.medium
        assert medium is not None
        try:
            if self._vision.plan(medium).grid == plan.grid:
                return open_image(medium.source, allow_private=self._vision.allow_private)
        except UnusableRow:
            pass
        _, height, width = plan.grid
        side = self._vision.patch_size
        return Image.new("RGB", (width * side, height * side), GREY)
