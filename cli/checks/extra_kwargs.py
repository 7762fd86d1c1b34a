"""Checks of --megatron_extra_kwargs, --vllm_engine_kwargs and --vllm_quantization: settings of other packages."""

import json
from collections.abc import Iterable, Mapping

from ...bridge.option_groups import flag_value
from ...bridge.options import CORE_SETTINGS
from ...tasks.options import GkdOptions, GrpoOptions, InferOptions, RolloutOptions, SftOptions
from ..flags import UsageError, flags_of, show
from .model import HfConfig, count_experts

# Fields of vLLM's EngineArgs that have a flag here -> the flag
ENGINE_FLAGS = {
    "model": "model",
    "tokenizer": "model",
    "revision": "model_revision",
    "hf_token": "hub_token",
    "dtype": "torch_dtype",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_data_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_len",
    "max_num_seqs": "vllm_max_num_seqs",
    "quantization": "vllm_quantization",
    "enforce_eager": "vllm_enforce_eager",
    "enable_prefix_caching": "vllm_enable_prefix_caching",
    "enable_lora": "vllm_enable_lora",
    "max_lora_rank": "vllm_max_lora_rank",
    "enable_return_routed_experts": "vllm_enable_return_routed_experts",
    "limit_mm_per_prompt": "vllm_limit_mm_per_prompt",
    "mm_processor_cache_gb": "vllm_mm_processor_cache_gb",
    "seed": "seed",
    "hf_overrides": "rope_scaling",
}
# Fields that both, or only the engines of a training run, have set already -> the reason
SET_HERE = {"use_tqdm_on_load": "it follows the terminal", "trust_remote_code": "no code of checkpoints is run"}
SET_IN_ROLLOUTS = dict.fromkeys(
    ("quantization_config", "load_format", "weight_transfer_config", "worker_extension_cls"),
    "weights come from the training run",
)
SET_IN_ROLLOUTS |= dict.fromkeys(
    ("generation_config", "override_generation_config", "logprobs_mode", "max_logprobs", "logits_processors"),
    "sampling and log-probabilities are those of the training run",
)
SET_IN_ROLLOUTS |= dict.fromkeys(
    ("speculative_config", "spec_method", "spec_model", "spec_tokens"), "there is no support for speculative decoding"
)
SET_IN_ROLLOUTS |= dict.fromkeys(
    ("distributed_executor_backend", "pipeline_parallel_size", "data_parallel_backend", "worker_cls", "nnodes"),
    "the layout of its processes is set here",
)
SET_IN_ROLLOUTS |= {"enable_sleep_mode": "--sleep_level sets it", "disable_log_stats": "the trainer logs"}


def check_core_settings(options: SftOptions, model: HfConfig | None) -> None:
    """Raise UsageError for fields of --megatron_extra_kwargs that are unknown, set by a flag, or without effect."""
    settings = options.build.megatron_extra_kwargs
    flag = _flag("megatron_extra_kwargs", settings)
    for name, value in settings.items():
        if name not in CORE_SETTINGS:
            raise UsageError(f"{flag}: {_refusal(name, value, flags_of(type(options)))}")
        kind = CORE_SETTINGS[name]
        is_valid = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not is_valid or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{flag}: {name} must be {_KINDS[kind]}. Set one.")
        if name.startswith("moe_") and model is not None and not count_experts(model):
            raise UsageError(f"{flag}: {name} is for models with experts. Remove it.")
        if name in FP8_SETTINGS and options.build.fp8_format is None:
            raise UsageError(f"{flag}: {name} needs --fp8_format. Set it, as in --fp8_format hybrid.")


FP8_SETTINGS = "fp8_margin", "tp_only_amax_red"
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def _refusal(name: str, value: object, flags: Iterable[str]) -> str:
    if name in flags:
        return f"{name} has a flag. Set --{name} {show(value)}."
    return (
        f"{name} is not among the fields that are known to be safe ({', '.join(CORE_SETTINGS)}). Remove it: "
        "config.json describes the model."
    )


def check_engine_settings(options: GrpoOptions | GkdOptions | RolloutOptions | InferOptions) -> None:
    """Raise UsageError for fields of --vllm_engine_kwargs that are set here. vLLM's own names are checked with it."""
    settings: Mapping[str, object] = flag_value(options, "vllm_engine_kwargs")
    flag, flags = _flag("vllm_engine_kwargs", settings), flags_of(type(options))
    reasons = SET_HERE if isinstance(options, InferOptions) else SET_HERE | SET_IN_ROLLOUTS
    for name, value in settings.items():
        if (own := ENGINE_FLAGS.get(name)) in flags:
            fix = f"Set --{own}." if isinstance(value, list | dict) else f"Set --{own} {show(value)}."
            raise UsageError(f"{flag}: {name} has a flag. {fix}")
        if reason := reasons.get(name):
            raise UsageError(f"{flag}: {name} cannot be set: {reason}. Remove it.")


def check_quantization(options: GrpoOptions | GkdOptions | RolloutOptions, model: HfConfig | None) -> None:
    """Raise UsageError for --vllm_quantization with updates that vLLM is not known to quantize."""
    method = flag_value(options, "vllm_quantization")
    if method is None:
        return
    flag = f"--vllm_quantization {method}"
    if model is not None and count_experts(model):
        raise UsageError(f"{flag}: not for models with experts, whose updates are not tested. Remove it.")
    if flag_value(options, "vllm_enable_lora"):
        raise UsageError(f"{flag}: not tested with --vllm_enable_lora true. Remove one of them.")


def _flag(name: str, settings: Mapping[str, object]) -> str:
    return f"--{name} {json.dumps(settings)}"
