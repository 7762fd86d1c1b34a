"""Images, videos and audios of prompts in vLLM: its arguments, and a request's prompt."""

from pathlib import Path
from typing import Any

from ...bridge.checkpoint.hub import read_config
from ...templates.formats.medium import MediaKind
from ...templates.json_types import JsonObject
from ...templates.media.families import FAMILIES
from ...templates.media.processor import VisionProcessor
from ..options.groups import GenerationOptions
from ..options.rollout import VllmOptions
from .engine import Request
from .request_image import LARGEST
from .vllm_audios import audio_data, hear


def image_arguments(
    folder: Path,
    options: VllmOptions | GenerationOptions,
    most_images: int | None = None,
    most_videos: int = 0,
    most_audios: int | None = None,
) -> JsonObject:
    """Return vLLM's arguments for the model in `folder` with images, videos or audios in prompts.

    most_images, most_videos, most_audios: of a prompt of the data; None: unknown. Raises ValueError if the options
    allow fewer, or are for media that the model does not take.
    """
    limits, cache = options.vllm_limit_mm_per_prompt, options.vllm_mm_processor_cache_gb
    family = FAMILIES.get(read_config(folder).get("model_type", ""))
    if family is None:
        if limits or cache is not None:
            flag = f"--vllm_limit_mm_per_prompt {limits}" if limits else f"--vllm_mm_processor_cache_gb {cache:g}"
            raise ValueError(f"{flag}: the model takes no images. Remove it.")
        return {}
    if most_images == most_videos == most_audios == 0 and not limits:  # texts alone
        return {}
    counts: dict[MediaKind, int | None] = {"image": most_images, "video": most_videos, "audio": most_audios}
    for kind, most in counts.items():
        if limits.get(kind) and family.placeholder(kind) is None:
            raise ValueError(f"--vllm_limit_mm_per_prompt {limits}: the model takes no {kind}s. Remove it.")
        if most and limits.get(kind, most) < most:
            raise ValueError(
                f"--vllm_limit_mm_per_prompt {limits}: the data has a prompt of {most} {kind}s. Set at least as many, "
                "or remove it."
            )
    if family.image is None:
        hear()
        needed = {"audio": most_audios} if most_audios else {}
        arguments: JsonObject = {"limit_mm_per_prompt": needed | limits, "enable_mm_embeds": True}
    else:
        needed = {"image": most_images} if most_images else {}
        arguments = {"limit_mm_per_prompt": needed | {"video": most_videos} | limits}
    if cache is not None:
        arguments["mm_processor_cache_gb"] = cache
    return arguments


def takes_videos(vision: VisionProcessor) -> bool:
    """Return whether vLLM takes videos of a model as training does: those whose frames follow their times as text."""
    return vision.family.has_timestamps and not vision.family.has_image_tokens


def check_model(flag: str, model_type: str | None) -> None:
    """Raise ValueError, naming the flag, for a model with which vLLM does not answer in this version: an Omni model."""
    family = FAMILIES.get(model_type or "")
    if family is not None and family.image is not None and family.audio is not None:
        raise ValueError(f"{flag}: vLLM does not answer with {model_type} in this version. Use transformers.")


def vllm_prompt(request: Request) -> dict[str, Any]:
    """Return a request as a prompt of vLLM, which expands its placeholders by the checkpoint's processor."""
    prompt: dict[str, Any] = {"prompt_token_ids": request.tokens}
    media: dict[str, Any] = {}
    if request.images:
        media["image"] = [image.pixels for image in request.images]
    if request.videos:
        media["video"] = [video.frames for video in request.videos]
    if request.audios:
        return prompt | {"multi_modal_data": {"audio": audio_data(request.audios)}}
    if media:
        # The limits of a row are those of all its images; frames have training's size already.
        arguments = request.images[0].arguments if request.images else None
        if arguments is None:
            image = request.images[0] if request.images else None
            least, most = (image.min_pixels, image.max_pixels) if image else (1, LARGEST)
            arguments = {"size": {"shortest_edge": least, "longest_edge": most}}
        prompt |= {"multi_modal_data": media, "mm_processor_kwargs": arguments}
    return prompt
