"""Checks of --vllm_enable_lora true, which sends only the adapter to vLLM."""

import importlib.util

from ...bridge.lora.settings import LoraSettings
from ...tasks.options import GkdOptions, GrpoOptions
from ...tasks.options.rollout import VllmOptions
from ...tasks.rollout.lora_support import unsupported_by_vllm
from ..flags import UsageError
from .lora import adapter_settings, check_fits
from .model import HfConfig


def check_max_lora_rank(options: VllmOptions) -> None:
    """Raise UsageError for --vllm_max_lora_rank without --vllm_enable_lora true."""
    rank = options.vllm_max_lora_rank
    if rank is not None and not options.vllm_enable_lora:
        raise UsageError(f"--vllm_max_lora_rank {rank}: only for --vllm_enable_lora true. Remove it.")


def check_vllm_lora(options: GrpoOptions | GkdOptions, model: HfConfig | None) -> None:
    """Raise UsageError if vLLM does not support the run's adapter or engine options."""
    engine = options.engine
    check_max_lora_rank(options.engine)
    if not engine.vllm_enable_lora:
        return
    flag = "--vllm_enable_lora true"
    if not options.tuner.has_adapters:
        raise UsageError(f"{flag}: only for --tuner_type lora, and all weights are trained. Remove it.")
    has_address = bool(engine.vllm_server_host or engine.vllm_server_base_url)
    uses_server = not engine.rollout_num_gpus and (engine.vllm_mode == "server" or has_address)
    if engine.use_vllm is False or (not uses_server and importlib.util.find_spec("vllm") is None):
        reason = "--use_vllm false is set" if engine.use_vllm is False else "it is not installed here"
        raise UsageError(f"{flag}: only for vLLM, and {reason}. Remove it.")
    if uses_server and engine.vllm_max_lora_rank is not None:
        raise UsageError(
            f"--vllm_max_lora_rank {engine.vllm_max_lora_rank}: read by a server when it starts. Set it for `swift "
            "rollout`, and remove it here."
        )
    if engine.sleep_level == 2:
        raise UsageError(
            f"{flag} cannot be used with --sleep_level 2, which discards the base weights, and they are not sent "
            "again. Set --sleep_level 1, or remove one of them."
        )
    if options.mcore_model and not uses_server:
        raise UsageError(
            f"{flag} cannot be used with --mcore_model {options.mcore_model}: vLLM reads the base weights from a "
            "Hugging Face folder. Make one with `swift export --to_hf true` and set it as --model."
        )
    if model is not None and "quantization_config" in model:
        raise UsageError(
            f"{flag} cannot be used with a quantized --model: vLLM would use other base weights than the training. "
            "Remove it."
        )
    settings = adapter_settings(options) or LoraSettings.from_options(options.lora)
    plan = None if model is None else check_fits(settings, model, options)
    if unsupported := unsupported_by_vllm(settings, plan):
        raise UsageError(f"{flag}: vLLM does not support {unsupported}. Remove one of them.")
    if (max_rank := engine.vllm_max_lora_rank) is not None and max_rank < settings.rank:
        raise UsageError(f"--vllm_max_lora_rank {max_rank}: less than --lora_rank {settings.rank}. Remove it.")
