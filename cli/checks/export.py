"""What an export cannot be, found before anything heavy is imported, and how many GPUs a model needs for it."""

import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...bridge.checkpoint.hub import model_folder, read_config
from ...tasks.options import ExportOptions, MegatronExportOptions
from ...tasks.run.planning import ProcessLayout, build_options, export_folder, shard_bytes
from ...tasks.system.atomic_dir import check_free
from ..flags import UsageError
from .common import check_pipeline, check_processes
from .lora import check_base, check_fits, settings_of, source_of, take_base
from .model import check_divisible, known_model

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
USABLE = 0.9  # share of a GPU's memory that weights may take
BESIDE = 2 * 2**30  # bytes that a process takes on its GPU beside the weights


def check_export(options: ExportOptions) -> tuple[dict[str, Any] | None, list[str]]:
    """config.json of what is to be exported (None: a hub's, which is not here yet), and notes for the user.

    Raises UsageError.
    """
    _formats(options)
    _adapter(options)
    try:
        shard_bytes(options.max_shard_size)
    except ValueError as error:
        raise UsageError(str(error)) from None
    notes = list(take_base(options, options))
    of_hub = options.adapters and not options.model and not options.mcore_model
    config = None if of_hub else known_model(options)  # the task finds the model
    notes += check_base(options, options, config)
    adapter = settings_of(options)
    if config is not None and adapter is not None:
        check_fits(adapter, config, options, source_of(options))
    if config is not None:
        sources = [options.mcore_model or options.model, *options.adapters, *filter(None, [options.mcore_adapter])]
        for source in sources:
            try:
                check_free(export_folder(options), Path(source).expanduser(), exist_ok=options.exist_ok)
            except ValueError as error:
                raise UsageError(str(error)) from None
    return config, notes


def _formats(options: ExportOptions) -> None:
    if options.to_mcore and options.to_hf:
        raise UsageError(
            "--to_mcore true and --to_hf true cannot be together: give one of them, for the format to export to."
        )
    if not options.to_mcore and not options.to_hf and not options.merge_lora:
        raise UsageError(
            "--to_mcore true and --to_hf true are both left out: give one of them, for the format to export to, or "
            "--adapters and --merge_lora true."
        )
    if options.to_hf and not options.mcore_model:
        raise UsageError("--to_hf true needs --mcore_model: the folder of a megatron-core checkpoint.")
    if options.mcore_model and not options.to_hf:
        raise UsageError(
            f"--mcore_model {options.mcore_model}: it is in megatron-core's format already. Give --to_hf true, or a "
            "Hugging Face checkpoint as --model."
        )


def _adapter(options: ExportOptions) -> None:
    source = source_of(options)
    if options.merge_lora and not source:
        raise UsageError("--merge_lora true needs --adapters: what is to be merged.")
    if options.adapters and not options.merge_lora:
        raise UsageError(
            f"{source}: it is in PEFT's format already. Give --merge_lora true to put it into the weights."
        )
    if source and not options.merge_lora and options.test_convert_precision:
        raise UsageError(
            "--test_convert_precision true compares models: it needs --merge_lora true here. Leave it out."
        )
    if options.mcore_adapter and not options.to_hf:
        raise UsageError(f"{source}: give --mcore_model with the weights that it is of, and --to_hf true.")


def check_export_layout(
    options: MegatronExportOptions, layout: ProcessLayout, config: dict[str, Any] | None, gpus: int, processes: int
) -> None:
    """Raise UsageError where the model, or the `processes` of this machine with its `gpus`, do not fit the layout."""
    # What only training asks for is not asked here.
    build = replace(build_options(options), sequence_parallel=True)
    check_pipeline(build)
    if config is not None:
        check_divisible(build, layout, config)
    check_processes(layout, gpus, processes)


def gpus_needed(options: ExportOptions, config: dict[str, Any] | None, gpus: int) -> tuple[int, list[str], str]:
    """Through how few GPUs a model can pass, the flags with which `megatron export` has them share it, and why.

    Raises UsageError where all of them together are too small.
    """
    memory = _gpu_bytes() if gpus > 1 else None
    if memory is None or not (options.mcore_model or options.model):  # of a hub's adapter the task finds the model
        return 1, [], ""
    folder = Path(options.mcore_model).expanduser() if options.mcore_model else model_folder(options)
    config = config or read_config(folder)
    weights = _bytes_of(folder, config, options.torch_dtype)
    for stages in range(1, gpus + 1):
        first, share = _stages(config, stages)
        if first is not None and weights * share + BESIDE <= USABLE * memory:
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
    """Memory of the smallest GPU; None where it cannot be told."""
    if not shutil.which("nvidia-smi"):
        return None
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    sizes = [int(line) for line in answer.stdout.split() if line.isdigit()]
    return min(sizes) * 2**20 if answer.returncode == 0 and sizes else None


def _bytes_of(folder: Path, config: dict[str, Any], dtype: str | None) -> int:
    """Bytes of the weights in `dtype`: what is on the disk, where they are in the type that config.json names."""
    files = [*folder.glob("*.safetensors"), *folder.glob("*.distcp"), *folder.glob("*/*.distcp")]
    stored = sum(file.stat().st_size for file in files)
    given = (config.get("text_config") or {}) | config
    own = given.get("dtype") or given.get("torch_dtype") or "float32"
    own_bytes = 1 if "quantization_config" in config else ITEM_BYTES.get(own, 4)
    return stored * ITEM_BYTES.get(dtype or own, 4) // own_bytes


def _stages(config: dict[str, Any], stages: int) -> tuple[int | None, float]:
    """Layers of the first of so many pipeline stages (0: as all; None: too few are left), and the largest's share."""
    layers = (config.get("text_config") or config).get("num_hidden_layers") or 1
    most = math.ceil(layers / stages)
    first = layers - (stages - 1) * most
    return (0 if layers % stages == 0 else first if first > 0 else None), most / layers
