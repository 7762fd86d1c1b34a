"""Images of requests as inputs of transformers' models, with the sizes, tokens and pixels of training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...bridge.checkpoint.pretrained import load_tokenizer
from ...templates.formats.medium import Medium
from ...templates.media.processor import MediaPlan, VisionProcessor
from ...templates.options import MediaOptions
from .engine import Request
from .request_image import RequestImage


class _Processed(NamedTuple):
    plan: MediaPlan
    patches: np.ndarray


class ImageInputs:
    """Images of requests for the model in `folder`. Raises ValueError if it has no processor of images."""

    def __init__(self, folder: Path):
        vision = VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())
        if vision is None:
            raise ValueError(
                f"{folder}: it has no preprocessor_config.json. Copy its files from the original checkpoint"
            )
        self.vision = vision

    def of(self, requests: Sequence[Request]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Return the prompts with all tokens of their images, and the images as inputs of the model."""
        images = {id(image): image for request in requests for image in request.images}
        processed = {key: self._process(image) for key, image in images.items()}
        placeholder, prompts = self.vision.image_token_id, []
        for request in requests:
            expansions = iter([processed[id(image)].plan.expanded(placeholder).tolist() for image in request.images])
            prompts.append(
                [
                    token
                    for token_id in request.tokens
                    for token in (next(expansions) if token_id == placeholder else [token_id])
                ]
            )
        media = [processed[id(image)] for request in requests for image in request.images]
        return prompts, self.vision.image_inputs([(image.plan, image.patches) for image in media])

    def _process(self, image: RequestImage) -> _Processed:
        pixels: Any = image.pixels
        medium = Medium("image", pixels, {"min_pixels": image.min_pixels, "max_pixels": image.max_pixels})
        plan = self.vision.plan(medium)
        return _Processed(plan, self.vision.patches(medium, plan.grid))
