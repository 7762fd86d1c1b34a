"""Media of requests as inputs of transformers' models, with the sizes, tokens and values of training."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...bridge.checkpoint.pretrained import load_tokenizer
from ...templates.dataset.transformers_inputs import Values, transformers_inputs
from ...templates.formats.medium import Medium
from ...templates.media.processor import VisionProcessor
from ...templates.options import MediaOptions
from .engine import Request
from .request_image import RequestImage


class RequestInputs:
    """Media of requests for the model in `folder`. Raises ValueError if it has no processor of media."""

    def __init__(self, folder: Path):
        vision = VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())
        if vision is None:
            raise ValueError(
                f"{folder}: it has no preprocessor_config.json. Copy its files from the original checkpoint"
            )
        self.vision = vision

    def expand(self, requests: Sequence[Request]) -> tuple[list[list[int]], list[Values]]:
        """Return the prompts with all tokens of their media, and these media in the order of the prompts."""
        images = {id(image): image for request in requests for image in request.images}
        processed = {key: self._process(image) for key, image in images.items()}
        prompts, media = [], []
        for request in requests:
            of_kind: dict[str, Iterator[Values]] = {
                "image": iter([processed[id(image)] for image in request.images]),
                "video": iter([(video.plan, video.patches) for video in request.videos]),
                "audio": iter([(audio.plan, audio.spectrogram) for audio in request.audios]),
            }
            kinds = {token: of_kind[kind] for kind, token in self.vision.placeholders.items()}
            prompt: list[int] = []
            for token in request.tokens:
                # Placeholders that a model has drawn behind the media have none.
                values = next(kinds[token], None) if token in kinds else None
                if values is not None:
                    media.append(values)
                prompt += [token] if values is None else values[0].expanded(token).tolist()
            prompts.append(prompt)
        return prompts, media

    def inputs(self, media: Sequence[Values], tokens: Tensor) -> dict[str, Any]:
        """Return the inputs of a model for media of prompts. tokens: int64 [prompts, longest]"""
        return transformers_inputs(media, tokens, self.vision)

    def _process(self, image: RequestImage) -> Values:
        pixels: Any = image.pixels
        medium = Medium("image", pixels, {"min_pixels": image.min_pixels, "max_pixels": image.max_pixels})
        plan = self.vision.plan(medium)
        return plan, self.vision.patches(medium, plan.grid)
