"""Checks of a model by its config.json: supported, complete, and divisible by the layout."""

from collections.abc import Collection, Iterator
from pathlib import Path

from ...bridge.checkpoint.hub import (
    ADAPTER_CONFIG,
    INDEX,
    MCORE_FILES,
    get_max_positions,
    mcore_folder,
    no_weights_message,
    read_config,
)
from ...bridge.checkpoint.rope_scaling import scale_rope
from ...bridge.families import family_of
from ...bridge.option_groups import flag_value
from ...bridge.options import BuildOptions, ModelOptions
from ...tasks.run.planning import ProcessLayout
from ...templates.json_types import JsonObject
from ..flags import UsageError, usage_errors
from .pipeline import check_layers

type HfConfig = JsonObject  # config.json of a model

SAFETENSORS = "*.safetensors", INDEX  # files of weights
WEIGHT_FILES = *SAFETENSORS, *MCORE_FILES  # a checkpoint may be in either format
EXPERT_KEYS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"  # keys of various families


def read_model_config(options: ModelOptions, *, weights: Collection[str]) -> HfConfig | None:
    """Return config.json of a local model; None for a hub id, which the task downloads.

    weights: file patterns, of which at least one must match
    """
    if not options.model:
        raise UsageError("--model: missing. Set the folder of a Hugging Face checkpoint, or a hub id.")
    folder = Path(options.model).expanduser()
    if not folder.is_dir():
        if folder.is_file():
            raise UsageError(f"--model {options.model}: is a file. Set the folder of a Hugging Face checkpoint.")
        if options.model.startswith((".", "/", "~")) or options.model.count("/") != 1:
            raise UsageError(f"--model {options.model}: no such model folder. Set a folder, or a hub id as OWNER/NAME.")
        return None
    if (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors*")):
        raise UsageError(f"--model {options.model}: is an adapter. Set it as --adapters.")
    with usage_errors():
        config = read_config(folder)
    if weights and not any(file for pattern in weights for file in folder.glob(pattern)):
        raise UsageError(f"--model {options.model}: {no_weights_message(folder)}. Set a folder that has them.")
    if ("vision_config" in config or "audio_config" in config) and not _has_family(config):
        raise UsageError(f"--model {options.model}: multimodal models are not supported. Use a text model.")
    return config


def _has_family(config: HfConfig) -> bool:
    """Return whether a family supports the model, or the text part of a multimodal model."""
    try:
        family_of(config)
    except ValueError:
        return False
    return True


def supported_config(options: ModelOptions, *, weights: Collection[str] = WEIGHT_FILES) -> HfConfig | None:
    """Return config.json of a model; None for a hub id. Raises UsageError for an unsupported architecture."""
    if mcore := flag_value(options, "mcore_model", None):
        return _mcore_model(options, mcore)
    config = read_model_config(options, weights=weights)
    try:
        if config is not None:
            family_of(config)
    except ValueError as error:
        raise UsageError(f"--model {options.model}: {error}") from None
    return config if config is None else scaled_config(config, options)


def scaled_config(config: HfConfig, options: ModelOptions) -> HfConfig:
    """Return config.json with --rope_scaling and --max_model_len. Raises UsageError if they are unusable."""
    with usage_errors():
        return scale_rope(config, options)


def engine_config(options: ModelOptions) -> HfConfig | None:
    """Return config.json of a model for an inference engine; None for a hub id."""
    config = read_model_config(options, weights=SAFETENSORS)
    return config if config is None else scaled_config(config, options)


def rope_notes(options: ModelOptions, config: HfConfig | None, *, saves_config: bool = True) -> Iterator[str]:
    """Yield a note of the positions that --rope_scaling gives. config: of `scaled_config`"""
    if not options.rope_scaling:
        return
    text = {} if config is None else config.get("text_config") or config
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or options.rope_scaling
    factor = f" by {scaling['factor']:g}" if scaling.get("factor") else ""
    positions = f", for {get_max_positions(config)} positions" if config is not None else ""
    saved = "saved in config.json" if saves_config else "not in adapters: set it again to use them"
    yield f"--rope_scaling: {scaling.get('rope_type', scaling.get('type'))}{factor}{positions}; {saved}."


def _mcore_model(options: ModelOptions, mcore: str) -> HfConfig:
    if options.model:
        raise UsageError(
            f"--model {options.model}: config.json and tokenizer come from the folder of --mcore_model. Remove one of "
            "them."
        )
    folder = Path(mcore).expanduser()
    try:
        mcore_folder(folder)
        config = read_config(folder, mcore=True)
        family_of(config)
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        raise UsageError(text if text.startswith("--") else f"--mcore_model {folder}: {text}") from None
    return scaled_config(config, options)


def count_experts(model: HfConfig) -> int:
    """Return the number of experts of an MoE layer; 0 for a dense model."""
    model = model.get("text_config") or model
    return next((model[key] for key in EXPERT_KEYS if model.get(key)), 0)


def position_notes(flags: str, length: int, model: HfConfig | None) -> Iterator[str]:
    """Yield a note if `flags` allow sequences longer than the model's max_position_embeddings."""
    positions = None if model is None else get_max_positions(model)
    if positions is not None and length > positions:
        yield (
            f"{flags}: up to {length} tokens, and the model has {positions} positions (max_position_embeddings in "
            "config.json). It has not learned the positions beyond."
        )


def check_divisible(options: BuildOptions, layout: ProcessLayout, model: HfConfig) -> None:
    """Raise UsageError if the layout does not divide the model's sizes in config.json.

    Fewer KV heads than TP are no error: they are repeated.
    """
    config, model = model, model.get("text_config") or model
    tensor, kv_heads = layout.tensor, model.get("num_key_value_heads") or 1
    _check_divisor("tensor_model_parallel_size", tensor, model.get("num_attention_heads"), "attention heads")
    _check_divisor("tensor_model_parallel_size", tensor, model.get("intermediate_size"), "columns of the MLP")
    if max(kv_heads, tensor) % min(kv_heads, tensor):
        raise UsageError(
            f"--tensor_model_parallel_size {tensor}: the model's {kv_heads} key and value heads can be neither split "
            f"nor repeated over {tensor} processes. Set a divisor or a multiple of {kv_heads}."
        )
    if (key_heads := model.get("linear_num_key_heads")) and key_heads % (tensor * layout.context):
        raise UsageError(
            f"--tensor_model_parallel_size {tensor} x --context_parallel_size {layout.context}: does not divide the "
            f"{key_heads} key heads of the model's gated delta nets. Set a product that divides {key_heads}."
        )
    has_mamba = model.get("mamba_num_heads") or model.get("mamba_n_heads")
    mamba = family_of(config).describe(config).mamba if has_mamba and tensor * layout.context > 1 else None
    if mamba and mamba.units % (tensor * layout.context):
        noun = "groups" if mamba.pieces == 1 else "parts of the groups"
        raise UsageError(
            f"--tensor_model_parallel_size {tensor} x --context_parallel_size {layout.context}: does not divide the "
            f"{mamba.units} {noun} of the model's Mamba-2 layers. Set a product that divides {mamba.units}."
        )
    if experts := count_experts(model):
        _check_experts(options, layout, experts, model.get("moe_intermediate_size"))
    elif layout.expert > 1:
        raise UsageError(f"--expert_model_parallel_size {layout.expert}: the model has no experts. Remove it.")
    if layers := model.get("num_hidden_layers"):
        check_layers(options, layers)


def _check_divisor(flag: str, size: int, total: int | None, noun: str) -> None:
    if total and total % size:
        raise UsageError(f"--{flag} {size}: does not divide the model's {total} {noun}. Set a divisor of {total}.")


def _check_experts(options: BuildOptions, layout: ProcessLayout, experts: int, width: int | None) -> None:
    _check_divisor("expert_model_parallel_size", layout.expert, experts, "experts")
    _check_divisor("expert_tensor_parallel_size", layout.expert_tensor, width, "columns of an expert")
    if layout.tensor > 1 and not options.sequence_parallel:
        raise UsageError(
            f"--tensor_model_parallel_size {layout.tensor}: an MoE model with it needs sequence parallelism. Set "
            "--sequence_parallel true."
        )
