"""Images, videos and audios of prompts in vLLM: its arguments, and a request's prompt."""

import inspect
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from ...bridge.checkpoint.hub import read_config
from ...bridge.checkpoint.pretrained import load_tokenizer
from ...bridge.families import family_of
from ...bridge.families.thinker import THINKER, WHOLE
from ...bridge.families.vlm_text import text_config
from ...bridge.mapping.architecture import MIXERS, HfConfig
from ...templates.formats.medium import MediaKind
from ...templates.json_types import JsonObject
from ...templates.media.families import FAMILIES
from ...templates.media.processor import VisionProcessor
from ...templates.options import MediaOptions
from ..options.groups import GenerationOptions
from ..options.rollout import VllmOptions
from .engine import Request
from .request_image import LARGEST
from .vllm_audios import audio_data, hear
from .vllm_kwargs import is_vllm_before

# Mixers with which vLLM's builds for CPUs fail, before 0.32 and since: they have no Triton.
CPU_LACKED = {"falcon_h1": {"attention_and_mamba"}, "granitemoehybrid": {"mamba"}, "nemotron_h": {"mamba"}}
CPU_LACKS = {"kimi_linear": {"kimi_delta"}}
# Mixers that vLLM computes by transformers' layers, since it has no class for the model: they get all tokens of a step
# as one document, without the states of earlier steps (`Base.forward` in vLLM's models/transformers/base.py).
STATELESS = {"minimax": {"lightning_attention"}}


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
    config = read_config(folder)
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        if limits or cache is not None:
            flag = f"--vllm_limit_mm_per_prompt {limits}" if limits else f"--vllm_mm_processor_cache_gb {cache:g}"
            raise ValueError(f"{flag}: the model takes no images. Remove it.")
        return {}
    if family.processor == "internvl_chat":
        from .vllm_internvl import register_in_vllm

        register_in_vllm()
    overrides = _config_overrides(config)
    if most_images == most_videos == most_audios == 0 and not limits:  # texts alone
        return overrides
    counts: dict[MediaKind, int | None] = {"image": most_images, "video": most_videos, "audio": most_audios}
    for kind, most in counts.items():
        if limits.get(kind) and family.placeholder(kind) is None:
            raise ValueError(f"--vllm_limit_mm_per_prompt {limits}: the model takes no {kind}s. Remove it.")
        if most and limits.get(kind, most) < most:
            raise ValueError(
                f"--vllm_limit_mm_per_prompt {limits}: the data has a prompt of {most} {kind}s. Set at least as many, "
                "or remove it."
            )
    needed = {kind: most for kind, most in counts.items() if most}
    if family.image is not None:
        needed["video"] = most_videos
    arguments: JsonObject = overrides | {"limit_mm_per_prompt": needed | limits}
    if family.processor == "llama4":
        _limit_tiles()
    if family.audio is not None:
        hear(config["model_type"])
        arguments["enable_mm_embeds"] = True
    if cache is not None:
        arguments["mm_processor_cache_gb"] = cache
    return arguments


def _limit_tiles() -> None:
    """Have vLLM count the tiles of Llama 4's images within the limits of a request.

    vLLM counts them within those of the checkpoint, and cuts images within those of the request.
    """
    from vllm.model_executor.models.mllama4 import (  # pyright: ignore[reportMissingImports]
        Mllama4MultiModalProcessor,
        Mllama4ProcessingInfo,
    )

    # The method that counts, and its argument with the limits of a request.
    method, settings = "_call_hf_processor", "mm_kwargs"
    if "_postprocess_hf_mm_data" in vars(Mllama4MultiModalProcessor):  # newer than vLLM 0.26
        method, settings = "_postprocess_hf_mm_data", "hf_processor_mm_kwargs"
    process, most_tiles = getattr(Mllama4MultiModalProcessor, method), Mllama4ProcessingInfo.get_max_num_tiles
    if getattr(process, "limits_tiles", False):
        return
    limit: ContextVar[int | None] = ContextVar("limit", default=None)
    signature = inspect.signature(process)

    def process_within(*arguments: Any, **named_arguments: Any) -> Any:
        limits = signature.bind(*arguments, **named_arguments).arguments[settings]
        token = limit.set(limits.get("max_patches"))
        try:
            return process(*arguments, **named_arguments)
        finally:
            limit.reset(token)

    process_within.limits_tiles = True  # pyright: ignore[reportFunctionMemberAccess]
    setattr(Mllama4MultiModalProcessor, method, process_within)
    Mllama4ProcessingInfo.get_max_num_tiles = lambda self: limit.get() or most_tiles(self)


def _config_overrides(config: HfConfig) -> JsonObject:
    """Return what vLLM is to read otherwise than config.json has it.

    Whether an Omni model's output layer is tied, it reads from the settings of the language model, transformers and
    training from those of the thinker.
    """
    if WHOLE not in config:
        return {}
    return {"hf_overrides": {THINKER: {"text_config": {"tie_word_embeddings": config["tie_word_embeddings"]}}}}


def takes_videos(vision: VisionProcessor) -> bool:
    """Return whether vLLM takes videos of a model as training does: those whose frames follow their times as text."""
    return vision.family.has_timestamps and not vision.family.has_image_tokens


def takes_images(model_type: str) -> bool:
    """Return whether vLLM takes images of a family as training does: those whose tokens attend from left to right.

    vLLM's build for CPUs has no other attention, and that of its GPU kernels is untested. Gemma 4 E2B and E4B, whose
    tokens attend from left to right, are untested too.
    """
    family = FAMILIES.get(model_type)
    return family is None or not family.has_blocks


def check_model(flag: str, config: HfConfig, *, has_images: bool = False) -> None:
    """Raise ValueError, naming the flag, for a model with which vLLM does not answer in this version.

    has_images: prompts have some
    """
    model_type = config.get("model_type") or ""
    if not torch.cuda.is_available():
        _check_model_on_cpu(flag, config)
    if mixers := _mixers_among(STATELESS, config):
        raise ValueError(
            f"{flag}: vLLM has no class for {model_type} after 0.23, and keeps no states of its {mixers}. Use "
            "transformers."
        )
    if model_type == "kimi_vl":
        raise ValueError(
            f"{flag}: vLLM reads the images of {model_type} by the checkpoint's own code, which is never run here. "
            "Serve the saved folder by vLLM itself."
        )
    if model_type.endswith("_thinker"):
        raise ValueError(
            f"{flag}: vLLM has no class for {model_type}, a thinker by itself. Set the whole checkpoint, or use "
            "transformers."
        )
    if has_images and not takes_images(model_type):
        raise ValueError(f"{flag}: vLLM does not take the images of {model_type} in this version. Use transformers.")


def _check_model_on_cpu(flag: str, config: HfConfig) -> None:
    """Raise ValueError, naming the flag, for a model that vLLM's build for CPUs does not compute."""
    model_type, text, is_older = config.get("model_type"), text_config(config), is_vllm_before("0.32")
    if text.get("kv_lora_rank") and is_older:
        raise ValueError(
            f"{flag}: vLLM's build for CPUs has no latent attention before 0.32, as {model_type} has. Use "
            "transformers, if it has the model, a later vLLM, or a GPU."
        )
    lacking = _mixers_among(CPU_LACKED if is_older else CPU_LACKS, config)
    if text.get("kv_lora_rank") and text.get("index_topk"):
        lacking = "sparse attention"
    elif not lacking and model_type == "nemotron_h":
        has_experts = "num_moe_experts" in family_of(config).describe(config).transformer
        lacking = "experts without a gate" if has_experts else ""
    if lacking:
        raise ValueError(
            f"{flag}: vLLM's build for CPUs does not compute {lacking}, as {model_type} has. Use transformers, or a "
            "GPU."
        )


def _mixers_among(table: dict[str, set[str]], config: HfConfig) -> str:
    """Name the model's mixers that the table has for its type; "" if there are none."""
    names = table.get(config.get("model_type") or "")
    if not names:
        return ""
    present = names & {layer.mixer for layer in family_of(config).describe(config).layers}
    return " and ".join(MIXERS[name] for name in present)


class PromptWriter:
    """Requests as prompts of vLLM, which expands their placeholders by the checkpoint's processor.

    folder: of the checkpoint. Raises ValueError if its processor cannot be read.
    """

    def __init__(self, folder: Path):
        self._image_tokens = _image_tokens(folder)

    def __call__(self, request: Request) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": self._tokens(request)}
        media: dict[str, Any] = {}
        if request.images:
            media["image"] = [image.pixels for image in request.images]
        if request.videos:
            media["video"] = [video.frames for video in request.videos]
        if request.audios:
            media["audio"] = audio_data(request.audios)
        if not media:
            return prompt
        prompt["multi_modal_data"] = media
        if request.images or request.videos:
            prompt["mm_processor_kwargs"] = _processor_arguments(request)
        return prompt

    def _tokens(self, request: Request) -> list[int]:
        """Return the tokens of a request, with what vLLM looks for in place of its images' placeholders."""
        if self._image_tokens is None or not request.images:
            return request.tokens
        tokens, (placeholder, target) = list(request.tokens), self._image_tokens
        starts = range(len(tokens)) if len(target) > 1 else ()
        if any(tokens[start : start + len(target)] == target for start in starts):
            raise ValueError(
                "a prompt with images has the text <image>, which vLLM takes for an image of this model. Remove it "
                "from the data, or generate by transformers (--use_vllm false)."
            )
        places = [place for place, token in enumerate(tokens) if token == placeholder]
        for place in reversed(places[: len(request.images)]):  # a model has drawn those behind them
            tokens[place : place + 1] = target
        return tokens


def _image_tokens(folder: Path) -> tuple[int, list[int]] | None:
    """Return an image's placeholder and what vLLM replaces, the text of chat templates; None: they are the same."""
    family = FAMILIES.get(read_config(folder).get("model_type", ""))
    if family is None or not family.template_image:
        return None
    tokenizer = load_tokenizer(folder)
    vision = VisionProcessor.open(folder, tokenizer, MediaOptions())
    return vision and (vision.image_token_id, tokenizer.encode(family.template_image, add_special_tokens=False))


def _processor_arguments(request: Request) -> dict[str, Any]:
    """Return the arguments of the checkpoint's processor: the limits of a row are those of all its images."""
    image = request.images[0] if request.images else None
    if image is not None and image.arguments is not None:
        return image.arguments
    least, most = (image.min_pixels, image.max_pixels) if image else (1, LARGEST)  # frames have training's size already
    return {"size": {"shortest_edge": least, "longest_edge": most}}
