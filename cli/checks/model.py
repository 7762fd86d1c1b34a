"""What a model cannot be, as far as its config.json says, and how it cannot be laid out."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ...bridge.checkpoint.hub import (
    ADAPTER_CONFIG,
    INDEX,
    MCORE_FILES,
    mcore_folder,
    no_weights,
    positions_of,
    read_config,
)
from ...bridge.families import family_of
from ...bridge.options import BuildOptions, ModelOptions
from ...tasks.run.planning import ProcessLayout
from ...templates.plural import plural
from ..flags import UsageError

READ = (
    "*.safetensors",
    INDEX,
    *MCORE_FILES,
)  # what shows that a folder has weights; a checkpoint may be in either format
SAFETENSORS = "*.safetensors", INDEX
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"  # in config.json of some family


def read_model_config(options: ModelOptions, *, weights: Collection[str]) -> dict[str, Any] | None:
    """config.json of a local model; None for a hub id, which the task fetches. `weights`: patterns of files,
    of which one is to be there too."""
    if not options.model:
        raise UsageError("--model is needed: a folder with a Hugging Face checkpoint, or a hub id.")
    folder = Path(options.model).expanduser()
    if not folder.is_dir():
        if folder.is_file():
            raise UsageError(f"--model {options.model}: is a file. Give the folder of a Hugging Face checkpoint.")
        if options.model.startswith((".", "/", "~")) or options.model.count("/") != 1:
            raise UsageError(
                f"--model {options.model}: no such model folder. Give a folder, or a hub id as OWNER/NAME."
            )
        return None
    if (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors*")):
        raise UsageError(f"--model {options.model}: is an adapter. Give it as --adapters.")
    try:
        config = read_config(folder)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from None
    if weights and not any(file for pattern in weights for file in folder.glob(pattern)):
        raise UsageError(f"--model {options.model}: {no_weights(folder)}. Give a folder that has them.")
    if ("vision_config" in config or "audio_config" in config) and not _has_family(config):
        raise UsageError(f"--model {options.model}: this version does not have multimodal models. Give a text model.")
    return config


def _has_family(config: dict[str, Any]) -> bool:
    """Whether a model is known: of some that see, the text model is."""
    try:
        family_of(config)
    except ValueError:
        return False
    return True


def known_model(options: ModelOptions, *, weights: Collection[str] = READ) -> dict[str, Any] | None:
    """config.json of a model whose architecture is known; None for a hub id. Raises UsageError. `weights`: as above."""
    if mcore := getattr(options, "mcore_model", None):
        return _mcore_model(options, mcore)
    config = read_model_config(options, weights=weights)
    try:
        if config is not None:
            family_of(config)
    except ValueError as error:
        raise UsageError(f"--model {options.model}: {error}") from None
    return config


def _mcore_model(options: ModelOptions, mcore: str) -> dict[str, Any]:
    if options.model:
        raise UsageError(
            f"--model {options.model}: config.json and tokenizer come from the folder of --mcore_model. Leave one out."
        )
    folder = Path(mcore).expanduser()
    try:
        mcore_folder(folder)
        config = read_config(folder, mcore=True)
        family_of(config)
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        raise UsageError(text if text.startswith("--") else f"--mcore_model {folder}: {text}") from None
    return config


def experts_of(model: dict[str, Any]) -> int:
    """How many experts a layer has that has any; 0: the model is dense."""
    model = model.get("text_config") or model
    return next((model[key] for key in EXPERTS if model.get(key)), 0)


def beyond_positions(flags: str, length: int, model: dict[str, Any] | None) -> Iterator[str]:
    """A note where `flags` let a text be longer than the model's positions. `model`: its config.json; None: a hub's."""
    most = None if model is None else positions_of(model)
    if most is not None and length > most:
        yield (
            f"{flags}: up to {length} tokens, and the model is made for {most} (max_position_embeddings in config.json"
            "). What lies beyond is at positions that it has not learned."
        )


def check_divisible(options: BuildOptions, layout: ProcessLayout, model: dict[str, Any]) -> None:
    """Raise UsageError where the model's own sizes, as far as config.json names them, cannot be laid out so.

    Fewer KV heads than TP are repeated: no error.
    """
    model = model.get("text_config") or model
    tensor, kv_heads = layout.tensor, model.get("num_key_value_heads") or 1
    _divides("tensor_model_parallel_size", tensor, model.get("num_attention_heads"), "attention heads")
    _divides("tensor_model_parallel_size", tensor, model.get("intermediate_size"), "columns of the MLP")
    if max(kv_heads, tensor) % min(kv_heads, tensor):
        raise UsageError(
            f"--tensor_model_parallel_size {tensor}: the model's {kv_heads} key and value heads can be neither split "
            f"nor repeated over {tensor} processes. Give a divisor or a multiple of {kv_heads}."
        )
    if (key_heads := model.get("linear_num_key_heads")) and key_heads % (tensor * layout.context):
        raise UsageError(
            f"--tensor_model_parallel_size {tensor} x --context_parallel_size {layout.context}: does not divide the "
            f"{key_heads} key heads of the model's gated delta nets. Give a product that divides {key_heads}."
        )
    if experts := experts_of(model):
        _experts(options, layout, experts, model.get("moe_intermediate_size"))
    elif layout.expert > 1:
        raise UsageError(f"--expert_model_parallel_size {layout.expert}: the model has no experts. Leave it out.")
    if layers := model.get("num_hidden_layers"):
        _layers(options, layout, layers)


def _divides(flag: str, size: int, whole: int | None, what: str) -> None:
    if whole and whole % size:
        raise UsageError(f"--{flag} {size}: does not divide the model's {whole} {what}. Give a divisor of {whole}.")


def _experts(options: BuildOptions, layout: ProcessLayout, experts: int, width: int | None) -> None:
    _divides("expert_model_parallel_size", layout.expert, experts, "experts")
    _divides("expert_tensor_parallel_size", layout.expert_tensor, width, "columns of an expert")
    if layout.tensor > 1 and not options.sequence_parallel:
        raise UsageError(
            f"--tensor_model_parallel_size {layout.tensor}: training a mixture of experts with it needs "
            "--sequence_parallel true."
        )


def _layers(options: BuildOptions, layout: ProcessLayout, layers: int) -> None:
    chunks = options.virtual_pipeline_model_parallel_size or 1
    given = {
        name: value
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        if (value := getattr(options, name)) is not None
    }
    for name, value in given.items():
        if value % chunks:
            raise UsageError(f"--{name} {value}: not a multiple of --virtual_pipeline_model_parallel_size {chunks}.")
    stages, rest = layout.pipeline - len(given), layers - sum(given.values())
    if rest < stages * chunks or (rest % (stages * chunks) if stages else rest):
        spelled = "".join(f", --{name} {value}" for name, value in given.items())
        chunked = f", --virtual_pipeline_model_parallel_size {chunks}" if chunks > 1 else ""
        raise UsageError(
            f"--pipeline_model_parallel_size {layout.pipeline}{chunked}{spelled}: {rest} of the model's {layers} "
            f"layers cannot be shared evenly by {stages} stages of {plural(chunks, 'chunk')}. Give sizes that "
            "divide, or give the first or last stage another number by --decoder_first_pipeline_num_layers or "
            "--decoder_last_pipeline_num_layers."
        )
