"""Trained parameters: all weights, those that are not frozen, or adapters."""

from dataclasses import replace
from pathlib import Path

from ...bridge.checkpoint.adapter_files import load_adapter, read_settings
from ...bridge.checkpoint.distributed import load_distributed_adapter, read_distributed_settings
from ...bridge.checkpoint.hub import ADAPTER_WEIGHTS, LATEST, read_adapter_config
from ...bridge.checkpoint.safetensors_io import tensor_names
from ...bridge.checkpoint.tensor_names import abridge
from ...bridge.lora.attach import attach_adapters
from ...bridge.lora.disable_adapter import AdapterSwitch
from ...bridge.lora.settings import LoraSettings
from ...bridge.model.model import Model
from ...bridge.model.trainable import count_parameters, freeze, freeze_output, tower_modules
from ...bridge.option_groups import group_of
from ..distributed.collectives import broadcast_from_rank0, run_on_all_ranks
from ..options import EmbeddingOptions
from ..options.further_models import ReferenceOptions
from ..run.context import Run
from ..system.atomic_dir import WEIGHTS, read_manifest, verify_files


def choose_trained(model: Model, run: Run) -> list[str]:
    """Freeze the untrained parameters of a loaded model, or attach adapters. Return lines for the user.

    Every rank calls this; errors reach every rank.
    """
    options, names = run.options, tensor_names(run.model_folder)
    if (coeff := options.build.dsa_indexer_loss_coeff) and model.architecture.sparse is None:
        raise ValueError(f"--dsa_indexer_loss_coeff {coeff:g}: the model has no lightning indexer. Remove it")
    if options.tuner.has_adapters:
        settings = run_on_all_ranks(lambda: _settings(run, model))
        run_on_all_ranks(
            lambda: attach_adapters(
                model,
                run.hf_config,
                settings,
                seed=options.training.seed,
                names=names,
                vision=None if run.adapter_folder else run.vision_options,
            )
        )
        reference = group_of(options, ReferenceOptions)
        if model.lora and reference and not reference.is_separate:
            model.lora.switch = AdapterSwitch(model.parts)
        _read_adapter(model, run)
    else:
        run_on_all_ranks(lambda: freeze(model, run.hf_config, options.tuner, run.vision_options, names=names))
        if isinstance(options, EmbeddingOptions):  # without this, weight decay shrinks the unused output layer
            freeze_output(model)
    trained, total = count_parameters(model, run.hf_config)
    model.trained_share = trained / total
    lines = [f"trainable parameters: {trained:,} of {total:,} ({trained / total:.2%})"]
    if model.lora and model.lora.plan.skipped_modules:
        lines.append(
            f"no adapters: {abridge(model.lora.plan.skipped_modules)}, which take none in this version (docs/lora.md)"
        )
    return lines


def _settings(run: Run, model: Model) -> LoraSettings:
    """Return the LoRA settings of the options, or of the initial adapter if there is one."""
    options = run.options
    if run.adapter_folder is None:
        settings = LoraSettings.from_options(options.lora)
        if options.tuner.tuner_type == "lora_llm":
            if model.vision is None:
                raise ValueError("--tuner_type lora_llm: the model has no vision tower. Set --tuner_type lora")
            tower_names = tower_modules(model, run.vision_options)
            settings = replace(settings, modules_to_save=(*settings.modules_to_save, *tower_names))
        return settings
    if _is_peft_adapter(run.adapter_folder):
        settings = read_settings(run.adapter_folder, read_adapter_config(run.adapter_folder))
    else:
        settings = read_distributed_settings(run.adapter_folder)
    dropout = settings.dropout if options.lora.lora_dropout is None else options.lora.lora_dropout
    return replace(settings, dropout=dropout, dtype=options.lora.lora_dtype)


def _read_adapter(model: Model, run: Run) -> None:
    if folder := run.adapter_folder:
        broadcast_from_rank0(lambda: _verify_weights(folder))
        load = load_adapter if _is_peft_adapter(folder) else load_distributed_adapter
        run_on_all_ranks(lambda: load(model.parts, run.hf_config, model.lora, folder))


def _is_peft_adapter(folder: Path) -> bool:
    """Return whether an adapter is in PEFT's format, else megatron-core's."""
    return (folder / ADAPTER_WEIGHTS).is_file() or not (folder / LATEST).is_file()


def _verify_weights(folder: Path) -> None:
    names = [name for name in read_manifest(folder) if name.endswith(WEIGHTS)]
    if faults := verify_files(folder, checksums=True, names=names):
        raise ValueError(f"{folder} is damaged ({'; '.join(faults)}). Copy it again, or use another one")
