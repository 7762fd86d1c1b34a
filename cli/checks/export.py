"""Checks of an export, and the number of GPUs that it needs."""

import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from ...bridge.checkpoint.hub import model_folder, read_config
from ...tasks.options import ExportOptions, MegatronExportOptions
from ...tasks.run.planning import (
    ProcessLayout,
    build_options,
    export_folder,
    is_upload_only,
    shard_bytes,
    uploaded_folder,
)
from ...tasks.system.atomic_dir import check_free
from ..flags import UsageError, usage_errors
from .agreement import drop_second_model
from .common import check_processes
from .generation import as_flag
from .lora import adapter_flag, adapter_settings, check_base, check_fits, set_base_model
from .model import HfConfig, check_divisible, rope_notes, supported_config
from .pipeline import check_pipeline
from .upload import check_upload

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
USABLE_SHARE = 0.9  # fraction of a GPU's memory available to weights
OVERHEAD_BYTES = 2 * 2**30  # memory of a process on its GPU, without the weights


def check_export(options: ExportOptions) -> tuple[HfConfig | None, list[str]]:
    """Return config.json of the model to export (None: not downloaded yet), and notes. Raises UsageError."""
    notes = check_upload(options)
    if is_upload_only(options):
        _check_uploaded(options)
        return None, notes
    _check_fp8_flags(options)
    _check_formats(options)
    _check_adapter(options)
    _check_quantization(options)
    with usage_errors():
        shard_bytes(options.max_shard_size)
    notes += [*drop_second_model(options), *set_base_model(options, options)]
    is_hub_adapter = options.adapters and not options.model and not options.mcore_model
    config = None if is_hub_adapter else supported_config(options)  # the task reads the adapter's base model
    notes += check_base(options, options, config)
    notes += rope_notes(options, config)
    adapter = adapter_settings(options)
    if config is not None and adapter is not None:
        check_fits(adapter, config, options, adapter_flag(options))
    if config is not None:
        sources = [options.mcore_model or options.model, *options.adapters, *filter(None, [options.mcore_adapter])]
        for source in sources:
            with usage_errors():
                check_free(export_folder(options), Path(source).expanduser(), exist_ok=options.exist_ok)
    return config, notes


def _check_uploaded(options: ExportOptions) -> None:
    """Raise UsageError if the folder to upload as it is does not exist."""
    name = uploaded_folder(options)
    if not name:
        raise UsageError("--push_to_hub true: nothing to upload. Set --model or --adapters, or --to_hf true.")
    if not Path(name).expanduser().is_dir():
        raise UsageError(f"--push_to_hub true: {name} is no folder. Set that of a checkpoint.")


def _check_formats(options: ExportOptions) -> None:
    if options.to_mcore and options.to_hf:
        raise UsageError("--to_mcore true cannot be used with --to_hf true. Remove one of them.")
    if not options.to_mcore and not options.to_hf and (options.mcore_model or not options.merge_lora):
        raise UsageError(
            "--to_mcore, --to_hf: missing. Set one of them to true, for the format to export to, or set --adapters and "
            "--merge_lora true."
        )
    has_adapter = options.adapters or options.mcore_adapter
    changes = options.mcore_model or has_adapter or options.torch_dtype or options.quant_method
    if options.to_hf and not changes:
        raise UsageError(
            "--to_hf true needs --mcore_model, the folder of a megatron-core checkpoint. Set it, or --mcore_adapter or "
            "--adapters beside --model, or --quant_method fp8, or the --torch_dtype to convert --model to."
        )
    if options.mcore_model and options.to_mcore and not has_adapter:
        raise UsageError(
            f"--mcore_model {options.mcore_model}: is in megatron-core's format already. Set --to_hf true, or a "
            "Hugging Face checkpoint as --model."
        )


def _check_fp8_flags(options: ExportOptions) -> None:
    fp8_flag = next((name for name in ("fp8_format", "fp8_recipe") if getattr(options, name, None)), None)
    if fp8_flag and not options.quant_method:
        raise UsageError(
            f"{as_flag(fp8_flag, options)}: an export computes nothing in FP8. Set --fp8_param_gather true to write "
            "FP8 weights, or remove it."
        )


def _check_quantization(options: ExportOptions) -> None:
    if not options.quant_method:
        return
    flag = f"--quant_method {options.quant_method}"
    if options.to_mcore:
        raise UsageError(f"{flag} is for Hugging Face folders. Set --to_hf true in place of --to_mcore true.")
    if adapter_flag(options) and not options.merge_lora:
        raise UsageError(f"{flag}: an adapter alone is not quantized. Set --merge_lora true, or remove it.")
    if options.test_convert_precision:
        raise UsageError(f"--test_convert_precision true cannot be used with {flag}, which rounds weights. Remove it.")


def _check_adapter(options: ExportOptions) -> None:
    source = adapter_flag(options)
    if options.merge_lora and not source:
        raise UsageError("--merge_lora true needs an adapter to merge. Set --adapters.")
    if source and not options.merge_lora and bool(options.adapters) != options.to_mcore:
        name = "PEFT's" if options.adapters else "megatron-core's"
        raise UsageError(f"{source}: is in {name} format already. Set --merge_lora true to merge it.")
    if source and options.mcore_model and options.test_convert_precision and not (options.merge_lora and options.to_hf):
        raise UsageError(
            "--test_convert_precision true: transformers reads neither side of this export. Set the model's Hugging "
            "Face checkpoint as --model in place of --mcore_model, or remove the flag."
        )


def check_export_layout(
    options: MegatronExportOptions, layout: ProcessLayout, config: HfConfig | None, gpus: int, processes: int
) -> None:
    """Raise UsageError if the layout does not fit the model, or this machine's processes and GPUs."""
    # Only training with experts and TP requires sequence parallelism.
    build = replace(build_options(options), sequence_parallel=True)
    check_pipeline(build)
    if config is not None:
        check_divisible(build, layout, config)
    check_processes(layout, gpus, processes)


def gpus_needed(options: ExportOptions, config: HfConfig | None, gpus: int) -> tuple[int, list[str], str]:
    """Return the fewest GPUs that hold the model, the flags of `megatron export` for them, and the reason.

    Raises UsageError if all GPUs together are too small.
    """
    memory = _gpu_bytes() if gpus > 1 else None
    if memory is None or not (options.mcore_model or options.model):  # the task reads a hub adapter's base model
        return 1, [], ""
    folder = Path(options.mcore_model).expanduser() if options.mcore_model else model_folder(options)
    config = config or read_config(folder)
    weights = _weight_bytes(folder, config, options.torch_dtype)
    for stages in range(1, gpus + 1):
        first, share = _split_layers(config, stages)
        if first is not None and weights * share + OVERHEAD_BYTES <= USABLE_SHARE * memory:
            break
    else:
        raise UsageError(
            f"{folder}: its weights take {weights / 2**30:.0f} GiB, and the {gpus} visible GPUs have "
            f"{memory / 2**30:.0f} GiB each. Set CUDA_VISIBLE_DEVICES= (to nothing) to convert on the CPU."
        )
    if stages == 1:
        return 1, [], ""
    flags = ["--pipeline_model_parallel_size", str(stages)]
    flags += ["--decoder_first_pipeline_num_layers", str(first)] if first else []
    sizes = f"the weights take {weights / 2**30:.0f} GiB, a GPU has {memory / 2**30:.0f} GiB"
    return stages, flags, f"{sizes}: {stages} GPUs share the layers."


def _gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU, or None if unknown."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    sizes = [int(line) for line in answer.stdout.split() if line.isdigit()]
    return min(sizes) * 2**20 if answer.returncode == 0 and sizes else None


def _weight_bytes(folder: Path, config: HfConfig, dtype: str | None) -> int:
    """Return the bytes of the weights in `dtype`, from the file sizes and the dtype in config.json."""
    files = [*folder.glob("*.safetensors"), *folder.glob("*.distcp"), *folder.glob("*/*.distcp")]
    stored = sum(file.stat().st_size for file in files)
    flat = (config.get("text_config") or {}) | config
    stored_dtype = flat.get("dtype") or flat.get("torch_dtype") or "float32"
    stored_bytes = ITEM_BYTES.get(stored_dtype, 4)
    if quantization := flat.get("quantization_config"):
        stored_bytes = 1 if quantization.get("quant_method") == "fp8" else 0.5
    return int(stored * ITEM_BYTES.get(dtype or stored_dtype, 4) / stored_bytes)


def _split_layers(config: HfConfig, stages: int) -> tuple[int | None, float]:
    """Return the layers of the first stage (0: as the others; None: impossible), and the largest stage's share."""
    text = config.get("text_config") or config
    layers = text.get("num_hidden_layers") or len(text.get("layers_block_type") or "-")  # the latter: Nemotron-H
    layers_per_stage = math.ceil(layers / stages)
    first = layers - (stages - 1) * layers_per_stage
    return (0 if layers % stages == 0 else first if first > 0 else None), layers_per_stage / layers
