"""Decoded images, videos and audios as inputs of transformers' models."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formats.medium import MediaKind
from ..media.processor import MediaPlan, VisionProcessor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
SEEN = KINDS[:2]  # these have a type of token

type Values = tuple[MediaPlan, np.ndarray]  # a medium, and its values as of `VisionProcessor.decode`


def transformers_inputs(media: Iterable[Values], tokens: "Tensor", vision: VisionProcessor) -> dict[str, Any]:
    """Return the inputs of a model for the media of a batch; {} without any.

    They are tensors, or true; `pixel_values_videos` of LLaVA-OneVision is a list of one for each video.
    media: in the order of the batch's documents
    tokens: int64 [documents, longest]
    """
    import torch

    family = vision.family
    plans: dict[MediaKind, list[Values]] = {kind: [] for kind in KINDS}
    for plan, values in media:
        if plan.kind == "video" and family.has_image_tokens:
            # As images: transformers' GLM looks for the features of all images among all videos, and the reverse.
            plans["image"] += _frames(plan, values)
        else:
            plans[plan.kind].append((plan, values))
    inputs: dict[str, Any] = {}
    if images := plans["image"]:
        inputs |= vision.image_inputs(images)
    if videos := plans["video"]:
        inputs |= vision.video_inputs(videos)
    if audios := plans["audio"]:
        assert vision.audio is not None
        inputs |= vision.audio.inputs([spectrogram for _, spectrogram in audios])
        if any(plan.is_sound for plan, _ in audios):
            inputs["use_audio_in_video"] = True
    if family.has_blocks and images:
        inputs[family.block_types] = (tokens == vision.image_token_id).long()
    # Omni models find media by the tokens before them.
    if family.has_axes and not family.follows_time and (images or videos):
        kinds = torch.zeros_like(tokens, dtype=torch.int32)
        for number, kind in enumerate(SEEN, 1):  # transformers' numbers
            if plans[kind]:
                kinds[tokens == vision.placeholder_id(kind)] = number
        inputs["mm_token_type_ids"] = kinds
    return inputs


def _frames(plan: MediaPlan, patches: np.ndarray) -> list[Values]:
    """Return the patches of time of a video, each as an image."""
    time, height, width = plan.grid
    frame = plan._replace(grid=(1, height, width))
    return [(frame, part) for part in patches.reshape(time, height * width, -1)]


def to_model(inputs: Mapping[str, Any], device: "torch.device", dtype: "torch.dtype") -> dict[str, Any]:
    """Return inputs on a model's device, pixels and spectrograms in its dtype: Llama 4's tower takes no other."""

    def move(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [move(name, part) for part in value]
        if isinstance(value, bool):
            return value
        is_medium = name.startswith("pixel_values") or name == "input_features"
        return value.to(device, dtype if is_medium else value.dtype)

    return {name: move(name, value) for name, value in inputs.items()}
