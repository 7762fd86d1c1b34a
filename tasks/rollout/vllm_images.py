"""Images of prompts in vLLM: its arguments, and a request's prompt."""

from collections.abc import Mapping
from typing import Any

from ...templates.json_types import JsonObject
from ..options.rollout import VllmOptions
from .engine import Request


def image_arguments(options: VllmOptions, most_images: int | None = None) -> JsonObject:
    """Return vLLM's arguments for prompts with images.

    most_images: of a prompt of the data; None: unknown. Raises ValueError if the options allow fewer.
    """
    limits: Mapping[str, int] = options.vllm_limit_mm_per_prompt
    if most_images and limits and limits.get("image", most_images) < most_images:
        raise ValueError(
            f"--vllm_limit_mm_per_prompt {dict(limits)}: the data has a prompt of {most_images} images. Set at least "
            "as many, or remove it."
        )
    arguments: JsonObject = {}
    if most_images:
        limits = {"image": most_images, "video": 0} | dict(limits)
    if limits:
        arguments["limit_mm_per_prompt"] = dict(limits)
    if options.vllm_mm_processor_cache_gb is not None:
        arguments["mm_processor_cache_gb"] = options.vllm_mm_processor_cache_gb
    return arguments


def vllm_prompt(request: Request) -> dict[str, Any]:
    """Return a request as a prompt of vLLM, which expands its placeholders by the checkpoint's processor."""
    prompt: dict[str, Any] = {"prompt_token_ids": request.tokens}
    if request.images:
        first = request.images[0]  # the limits of a row are those of all its images
        size = {"shortest_edge": first.min_pixels, "longest_edge": first.max_pixels}
        prompt["multi_modal_data"] = {"image": [image.pixels for image in request.images]}
        prompt["mm_processor_kwargs"] = {"size": size}
    return prompt
