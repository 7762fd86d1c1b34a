"""Images of prompts as engines take them: pixels, and the limits to which they are resized."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ...templates.dataset.placed_media import PlacedMedium
from ...templates.formats.schemas import UnusableRow
from ...templates.media.images import open_image
from ...templates.media.processor import VisionProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

GREY = 128, 128, 128
LARGEST = 2**31  # pixels


@dataclass(frozen=True, eq=False)
class RequestImage:
    """Image of a prompt. It is decoded once for all completions of the prompt, where an engine needs it."""

    load: "Callable[[], Image]"
    min_pixels: int  # limits of its area after resizing
    max_pixels: int
    arguments: dict[str, Any] | None = None  # the same as the checkpoint's processor takes them; None: as Qwen2-VL's

    @classmethod
    def within(
        cls, load: "Callable[[], Image]", min_pixels: int, max_pixels: int, vision: VisionProcessor
    ) -> "RequestImage":
        return cls(load, min_pixels, max_pixels, vision.processor_arguments(min_pixels, max_pixels))

    @cached_property
    def pixels(self) -> "Image":
        """RGB, of the original size."""
        return self.load()


def training_image(placed: PlacedMedium, vision: VisionProcessor) -> RequestImage:
    """Return an image with the pixels that training uses."""
    assert placed.medium is not None
    limits = vision.limits.of_row(placed.medium.limits)
    return RequestImage.within(partial(_load, placed, vision), limits.min_pixels, limits.max_pixels, vision)


def resized_image(placed: PlacedMedium, vision: VisionProcessor) -> RequestImage:
    """Return an image of training's size. Engines have one limit for images and videos, which then changes none."""
    return RequestImage.within(partial(_load_resized, placed, vision), 1, LARGEST, vision)


def _load_resized(placed: PlacedMedium, vision: VisionProcessor) -> "Image":
    from PIL import Image

    assert placed.medium is not None
    (pixels,) = vision.resized_image(placed.medium, placed.plan.grid)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def _load(placed: PlacedMedium, vision: VisionProcessor) -> "Image":
    """Return an image; a grey one where its file cannot be used any more, as training does."""
    from PIL import Image

    plan, medium = placed.plan, placed.medium
    assert medium is not None
    try:
        if vision.plan(medium).is_same(plan):
            return open_image(medium.source, allow_private=vision.allow_private)
    except UnusableRow:
        pass
    _, height, width = plan.grid
    return Image.new("RGB", (width * vision.patch_size, height * vision.patch_size), GREY)
