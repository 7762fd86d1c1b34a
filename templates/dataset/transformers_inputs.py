"""Decoded images and videos as inputs of transformers' vision-language models."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats.medium import MediaKind
from ..media.processor import MediaPlan, VisionProcessor

if TYPE_CHECKING:
    from torch import Tensor

INPUTS: dict[MediaKind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}


def transformers_inputs(
    media: Iterable[tuple[MediaPlan, np.ndarray]], tokens: "Tensor", vision: VisionProcessor
) -> dict[str, "Tensor"]:
    """Return the inputs of a model for the images and videos of a batch; {} without any.

    media: in the order of the batch's documents, with their patches, as of `VisionProcessor.patches`
    tokens: int64 [documents, longest]
    """
    import torch

    media, inputs = list(media), dict[str, Any]()
    for kind, (values, grids) in INPUTS.items():
        planned = [(plan, patches) for plan, patches in media if plan.kind == kind]
        if not planned:
            continue
        inputs[values] = vision.normalize(torch.from_numpy(np.concatenate([patches for _, patches in planned])), kind)
        inputs[grids] = torch.tensor([plan.grid for plan, _ in planned])
        if kind == "video" and (rate := vision.tokens_per_second) is not None:
            inputs["second_per_grid_ts"] = torch.tensor([plan.time_step / rate for plan, _ in planned])
    if not inputs:
        return {}
    kinds = torch.zeros_like(tokens, dtype=torch.int32)
    for number, (kind, (values, _)) in enumerate(INPUTS.items(), 1):  # transformers' numbers
        if values in inputs:
            kinds[tokens == vision.placeholder_id(kind)] = number
    return inputs | {"mm_token_type_ids": kinds}
