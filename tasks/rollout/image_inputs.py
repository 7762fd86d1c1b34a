"""Images of requests as inputs of transformers' models, by the checkpoint's own processor."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoImageProcessor

from .engine import Request
from .request_image import RequestImage


class ImageInputs:
    """Image processor of a checkpoint. token_id: placeholder of an image, and each of its tokens"""

    def __init__(self, folder: Path, token_id: int):
        self.token_id = token_id
        self._processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def of(self, requests: Sequence[Request]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Return the prompts with all tokens of their images, and the images' patches and sizes.

        pixel_values: fp32 [patches, values]; image_grid_thw: int64 [images, 3]
        """
        images = {id(image): image for request in requests for image in request.images}
        processed = {key: self._process(image) for key, image in images.items()}
        prompts = []
        for request in requests:
            counts = iter([self._count_tokens(processed[id(image)][1]) for image in request.images])
            prompt = [
                token
                for token_id in request.tokens
                for token in ([token_id] * next(counts) if token_id == self.token_id else [token_id])
            ]
            prompts.append(prompt)
        inputs = [processed[id(image)] for request in requests for image in request.images]
        return prompts, {
            "pixel_values": torch.cat([pixels for pixels, _ in inputs]),
            "image_grid_thw": torch.cat([grids for _, grids in inputs]),
        }

    def _process(self, image: RequestImage) -> tuple[Tensor, Tensor]:
        size = {"shortest_edge": image.min_pixels, "longest_edge": image.max_pixels}
        inputs = self._processor(images=[image.pixels], size=size, return_tensors="pt")
        return inputs["pixel_values"], inputs["image_grid_thw"]

    def _count_tokens(self, grids: Tensor) -> int:
        return int(grids.prod()) // self._processor.merge_size**2
