"""What cannot be where vLLM is sent adapters alone: --vllm_enable_lora true."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from ...bridge.lora.settings import LoraSettings
from ...tasks.options.rollout import VllmOptions
from ...tasks.rollout.lora_support import RANKS, unsupported_by_vllm
from ..flags import UsageError
from .lora import check_fits, settings_of


def check_room(options: VllmOptions) -> None:
    """Raise UsageError for a rank for which nothing makes room."""
    rank = options.vllm_max_lora_rank
    if rank is None:
        return
    if not options.vllm_enable_lora:
        raise UsageError(f"--vllm_max_lora_rank {rank} is for --vllm_enable_lora true. Leave it out.")
    if not 1 <= rank <= RANKS[-1]:
        raise UsageError(f"--vllm_max_lora_rank {rank}: must be at least 1 and at most {RANKS[-1]}.")


def check_alone(options: Any, sources: Mapping[str, str], model: dict[str, Any] | None) -> None:
    """Raise UsageError for a run that would send what vLLM does not take. `model`: its raw config.json, if known."""
    check_room(options)
    if not options.vllm_enable_lora:
        return
    flag = "--vllm_enable_lora true"
    if options.tuner_type != "lora":
        raise UsageError(f"{flag} is for --tuner_type lora, and all weights are to be trained. Leave it out.")
    served = options.vllm_mode == "server" or bool(options.vllm_server_host or options.vllm_server_base_url)
    if options.use_vllm is False or (not served and importlib.util.find_spec("vllm") is None):
        why = "--use_vllm false" if options.use_vllm is False else "vLLM is not installed here"
        raise UsageError(
            f"{flag} is for vLLM, and {why}: transformers takes all weights, with the adapter in them. Leave it out."
        )
    if served and options.vllm_max_lora_rank is not None:
        raise UsageError(
            f"--vllm_max_lora_rank {options.vllm_max_lora_rank}: a server makes room when it is started. Give it to "
            "`swift rollout`, and leave it out here."
        )
    if options.sleep_level == 2:
        raise UsageError(
            f"{flag} cannot be with --sleep_level 2, which gives up the weights beneath the adapter, and they are not "
            "sent again. Give --sleep_level 1, or leave one of them out."
        )
    if options.mcore_model and not served:
        raise UsageError(
            f"{flag} cannot be with --mcore_model {options.mcore_model}: vLLM reads the weights beneath the adapter by "
            "itself, from a Hugging Face folder. Make one by `swift export --to_hf true` and give it as --model."
        )
    if model is not None and "quantization_config" in model:
        raise UsageError(
            f"{flag} is not for a quantised --model: vLLM would multiply by other weights beneath the adapter than are "
            "trained on. Leave it out."
        )
    settings = settings_of(options) or LoraSettings.of_options(options)
    plan = None if model is None else check_fits(settings, model, options)
    if what := unsupported_by_vllm(settings, plan):
        raise UsageError(f"{flag}: vLLM does not take {what}. Leave {flag} out, or that.")
    if (room := options.vllm_max_lora_rank) is not None and room < settings.rank:
        raise UsageError(
            f"--vllm_max_lora_rank {room}: there is to be room for the adapter's rank, {settings.rank} (--lora_rank). "
            "Leave it out."
        )
