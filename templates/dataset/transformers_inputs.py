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


def transformers_inputs(
    media: Iterable[tuple[MediaPlan, np.ndarray]], tokens: "Tensor", vision: VisionProcessor
) -> dict[str, "Tensor"]:
    """Return the inputs of a model for the media of a batch; {} without any.

    media: in the order of the batch's documents, with their values, as of `VisionProcessor.decode`
    tokens: int64 [documents, longest]
    """
    import torch

    inputs: dict[str, Any] = {}
    plans: dict[MediaKind, list[tuple[MediaPlan, np.ndarray]]] = {kind: [] for kind in KINDS}
    for plan, patches in media:
        plans[plan.kind].append((plan, patches))
    if images := plans["image"]:
        inputs |= vision.image_inputs(images)
    if videos := plans["video"]:
        patches = torch.from_numpy(np.concatenate([patches for _, patches in videos]))
        inputs["pixel_values_videos"] = vision.normalize(patches, "video")
        inputs["video_grid_thw"] = torch.tensor([plan.grid for plan, _ in videos])
        if (rate := vision.tokens_per_second) is not None:
            inputs["second_per_grid_ts"] = torch.tensor([plan.time_step / rate for plan, _ in videos])
    if audios := plans["audio"]:
        assert vision.audio is not None
        inputs |= vision.audio.inputs([spectrogram for _, spectrogram in audios])
    if images and not vision.family.has_axes:
        return inputs | image_kinds(tokens, vision)
    if not images and not videos:
        return inputs
    kinds = torch.zeros_like(tokens, dtype=torch.int32)
    if vision.family.has_image_tokens:
        start, end = vision.video_ends
        is_within = (tokens == start).cumsum(1) > (tokens == end).cumsum(1)
        kinds[tokens == vision.image_token_id] = 1
        return inputs | {"mm_token_type_ids": kinds * (1 + is_within.int())}
    for number, kind in enumerate(SEEN, 1):  # transformers' numbers
        if plans[kind]:
            kinds[tokens == vision.placeholder_id(kind)] = number
    return inputs | {"mm_token_type_ids": kinds}


def image_kinds(tokens: "Tensor", vision: VisionProcessor) -> dict[str, "Tensor"]:
    """Return the input of a model that tells tokens of images from text, if it has one. tokens: int64 of any shape"""
    is_image = tokens == vision.image_token_id
    if vision.family.has_blocks:
        return {"token_type_ids": is_image.long()}
    return {"mm_token_type_ids": is_image.int()} if vision.family.has_axes else {}


def to_model(inputs: "Mapping[str, Tensor]", device: "torch.device", dtype: "torch.dtype") -> dict[str, "Tensor"]:
    """Return inputs on a model's device, pixels and spectrograms in its dtype: Llama 4's tower takes no other."""
    return {
        name: tensor.to(device, dtype if name.startswith("pixel_values") or name == "input_features" else tensor.dtype)
        for name, tensor in inputs.items()
    }
