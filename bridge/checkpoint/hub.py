"""Folders of `--model` and `--adapters`, local or downloaded from a hub, and their config files."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..families.config_file import lift_config
from ..mapping.architecture import HfConfig
from ..option_groups import flag_value
from ..options import ModelOptions

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
# More than any published model has: above it the number of stored tensors is checked before layers are built.
MAX_TRUSTED_LAYERS = 1000
LATEST = "latest_checkpointed_iteration.txt"  # Megatron-LM's tracker file: names the checkpoint's subfolder
MCORE_FILES = LATEST, ".metadata", "metadata.json"  # files of a megatron-core checkpoint

# Weights in other formats (consolidated: a copy in Mistral's format), and files that are not part of a model. Patterns
# have no exceptions: those of .pt leave out spk_dict.pt, the voices of Qwen2.5-Omni.
_IGNORED = ["*.bin", "*[!t].pt", "*[!c]t.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx"]
_IGNORED += ["consolidated*.safetensors", "original/*", "figures/*"]
_COUNTS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_COUNTS += ("head_dim", "vocab_size", "max_position_embeddings")


def model_folder(options: ModelOptions, *, weights: bool = True) -> Path:
    """Return the folder of `--model`, downloaded if it is a hub id.

    weights: download the weights too, not just the small files.
    Raises FileNotFoundError, ImportError or (if the download fails) OSError, each with a fix.
    """
    ignored = _IGNORED if weights else [*_IGNORED, "*.safetensors"]
    revision = options.model_revision
    return _resolve_folder("--model", options.model, options, revision=revision, ignore_patterns=ignored)


def adapter_folder(options: ModelOptions, adapters: list[str]) -> Path | None:
    """Return the folder of `--adapters`, None without one. From a hub only the adapter's files are downloaded.

    Raises as `model_folder`, and ValueError for several adapters.
    """
    if not adapters:
        return None
    if len(adapters) > 1:
        raise ValueError(f"--adapters {' '.join(adapters)}: only one adapter is supported. Set one")
    return _resolve_folder("--adapters", adapters[0], options, allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS])


def set_base_model[T: ModelOptions](options: T, adapter: Path | None) -> T:
    """Return `options` with the adapter's base model as `--model`, if no model is set.

    Raises as `read_adapter_config` and `base_model_name`.
    """
    if adapter is None or options.model or flag_value(options, "mcore_model", None):
        return options
    mcore = bool(flag_value(options, "mcore_adapter", None))
    return replace(options, model=base_model_name(adapter, read_adapter_config(adapter, mcore=mcore)))


def base_model_name(adapter: Path, config: HfConfig) -> str:
    """Return the base model that an adapter's `config` names: a folder or a hub id.

    config: from `read_adapter_config`. Raises ValueError or FileNotFoundError if it names none, a folder that does not
    exist, or a folder without a Hugging Face checkpoint.
    """
    name = config.get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{adapter / ADAPTER_CONFIG} does not name its base model. Set --model")
    folder = Path(name).expanduser()
    if not folder.is_dir() and not _is_hub_id(name):
        raise FileNotFoundError(f"{adapter / ADAPTER_CONFIG}: its base model, {name}, does not exist. Set --model")
    if (folder / LATEST).is_file():
        raise ValueError(
            f"{adapter / ADAPTER_CONFIG}: its base model, {name}, is in megatron-core's format. Set it as "
            "--mcore_model, or the model's Hugging Face checkpoint as --model"
        )
    return name


def _resolve_folder(flag: str, name: str, options: ModelOptions, **filters: Any) -> Path:
    """Return the folder `name`, or download the hub id `name`. filters: arguments of snapshot_download."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    if not _is_hub_id(name):
        raise FileNotFoundError(f"{flag} {name}: no such folder. Set a folder, or a hub id (owner/name)")
    if options.use_hf:
        hub = "Hugging Face"
        from huggingface_hub import snapshot_download
    else:
        hub = "ModelScope"
        if importlib.util.find_spec("modelscope") is None:
            raise ImportError(
                f"{flag} {name}: no such folder. Set --use_hf true to download it from Hugging Face, "
                "or `pip install modelscope` to download it from ModelScope"
            )
        from modelscope import snapshot_download  # type: ignore[import-not-found]
    try:
        return Path(snapshot_download(name, token=options.hub_token, **filters))
    except Exception as error:  # hub clients raise many types: the user needs the name and the reason
        reason = " ".join(str(error).split())
        raise OSError(
            f"{flag} {name}: cannot be downloaded from {hub} ({reason}). Check the name, the network and, for a "
            "private one, --hub_token, or set a folder"
        ) from error


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def has_weights(folder: Path) -> bool:
    """Return whether a folder has safetensors weights."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def no_weights_message(folder: Path) -> str:
    """Return the error message for a folder without weights."""
    hint = ""
    if any(folder.glob("*.bin")):
        hint = (
            ". Its .bin files are not read: convert them, by transformers' from_pretrained and then save_pretrained, "
            "or take the model's checkpoint in safetensors"
        )
    return f"has no weights: no {INDEX} and no file that ends in .safetensors{hint}"


def is_mcore_checkpoint(folder: Path) -> bool:
    """Return whether a folder looks like a megatron-core checkpoint."""
    return any((folder / name).is_file() for name in MCORE_FILES)


def source_folder(options: ModelOptions, mcore_model: str | None, *, weights: bool = True) -> Path:
    """Return the folder with config.json, tokenizer and weights: `--mcore_model` if set, else that of `--model`.

    Raises as `mcore_folder` and `model_folder`.
    """
    if not mcore_model:
        return model_folder(options, weights=weights)
    folder = Path(mcore_model).expanduser()
    mcore_folder(folder)
    return folder


def mcore_folder(folder: str | Path, flag: str = "--mcore_model") -> Path:
    """Return the folder with a megatron-core checkpoint's files: `folder`, or the one that its tracker file names.

    Raises FileNotFoundError or ValueError, which name `flag`, if there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{flag} {folder}: no such folder. Set that of a megatron-core checkpoint")
    tracker, target = folder / LATEST, folder
    if tracker.is_file():
        text = tracker.read_text(errors="replace").strip()
        if text != "release" and not text.isdigit():
            raise ValueError(f"{tracker} has {text!r} instead of an iteration's number or release. Fix it")
        target = folder / (text if text == "release" else f"iter_{int(text):07}")
        if not target.is_dir():
            raise ValueError(f"{tracker} names {text}, but {target.name} is missing beside it. Copy the folder again")
    missing = [name for name in (".metadata", "metadata.json") if not (target / name).is_file()]
    if not missing:
        _check_format(target / "metadata.json")
        return target
    hint = ""
    if any(target.glob("*.distcp")):
        hint = f": {target.name} has *.distcp files, and no {' nor '.join(missing)}. Copy the folder again"
    elif any(target.glob("mp_rank_00*")):
        hint = ". It is in Megatron-LM's older format. Save it with Megatron-LM's --ckpt-format torch_dist"
    elif (target / ADAPTER_WEIGHTS).is_file():
        hint = ". It is an adapter in PEFT's format. Set it as --adapters"
    elif any(target.glob("*.safetensors")):
        hint = ". It is a Hugging Face checkpoint. Set it as --model"
    elif candidates := sorted(
        (file for name in (f"*/{LATEST}", f"*/*/{LATEST}", "*/metadata.json") for file in folder.glob(name)),
        key=lambda file: file.stat().st_mtime,
    ):
        hint = f". Is it {candidates[-1].parent} that you mean?"
        if candidates[-1].name != LATEST and (folder / "config.json").is_file():
            hint = (
                f". {candidates[-1].parent.name} is one, but no {LATEST} names it. Write the iteration's number there"
            )
    raise ValueError(f"{flag} {folder}: no megatron-core distributed checkpoint there{hint}")


def _check_format(path: Path) -> None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no checkpoint format ({error!r}). Copy the folder again") from None
    if stored != "torch_dist":
        raise ValueError(f"{path} has the format {stored!r}. Save it with Megatron-LM's --ckpt-format torch_dist")


def read_config(folder: str | Path, *, mcore: bool = False) -> HfConfig:
    """Return the raw config.json of a checkpoint folder, a thinker's lifted. mcore: the folder is `--mcore_model`.

    Raises FileNotFoundError or ValueError with a fix.
    """
    path = Path(folder) / "config.json"
    if mcore and not path.is_file() and (Path(folder) / ADAPTER_CONFIG).is_file():
        raise FileNotFoundError(f"--mcore_model {folder}: is an adapter. Set it as --mcore_adapter.")
    if mcore and not path.is_file():
        above = f" Is it {path.parents[1]} that you mean?" if (path.parents[1] / "config.json").is_file() else ""
        raise FileNotFoundError(
            f"--mcore_model {folder}: no config.json there. Copy it and the tokenizer's files from the "
            f"model's Hugging Face checkpoint into it.{above}"
        )
    if not path.is_file():
        candidates = [file for above in ("", "*/") for file in Path(folder).glob(f"{above}checkpoint-*/config.json")]
        candidates.sort(key=lambda file: file.stat().st_mtime)
        hint = f". Is it {candidates[-1].parent} that you mean?" if candidates else ""
        raise FileNotFoundError(f"--model {folder}: it has no config.json, so it is no Hugging Face checkpoint{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy it again from the original checkpoint") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: copy it again from the original checkpoint") from None
    config = lift_config(config)
    if fault := _find_fault(config):
        raise ValueError(f"{path} {fault}. Fix it, or use the file of the original checkpoint")
    layers = (config.get("text_config") or config).get("num_hidden_layers") or 0
    if layers > MAX_TRUSTED_LAYERS and has_weights(Path(folder)) and layers > (tensors := _count_tensors(Path(folder))):
        raise ValueError(
            f"{path} has num_hidden_layers {layers}, and the folder's weights are {tensors} tensors. Download it again"
        )
    return config


def _count_tensors(folder: Path) -> int:
    """Count the tensors in the index, or in the headers of safetensors files; 0 if they cannot be read."""
    try:
        if (folder / INDEX).is_file():
            return len(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        count = 0
        for file in folder.glob("*.safetensors"):
            with file.open("rb") as stream:
                count += len(json.loads(stream.read(int.from_bytes(stream.read(8), "little"))))
        return count
    except (ValueError, KeyError, TypeError, MemoryError, OverflowError):
        return 0


def get_vocab_size(config: HfConfig) -> int | None:
    """Return the vocab_size in a raw config.json, None if it has none."""
    return (config.get("text_config") or config).get("vocab_size")


def get_max_positions(model: HfConfig) -> int | None:
    """Return the maximum number of positions in a raw config.json, None if it has none.

    With rope scaling (such as YaRN): the scaled number.
    """
    model = model.get("text_config") or model
    positions = model.get("max_position_embeddings")
    rope = model.get("rope_parameters") or model.get("rope_scaling")
    if not isinstance(positions, int) or not isinstance(rope, dict):
        return positions if isinstance(positions, int) else None
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or positions
    return max(positions, int(original * factor)) if isinstance(factor, int | float) else positions


def read_adapter_config(folder: str | Path, *, mcore: bool = False) -> HfConfig:
    """Return the raw adapter_config.json of `--adapters`, a folder that must have the adapter's weights too.

    mcore: the folder is `--mcore_adapter`. Raises FileNotFoundError or ValueError with a fix.
    """
    folder = Path(folder)
    for name in (ADAPTER_CONFIG,) if mcore else (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            flag, hint = ("--mcore_adapter", _mcore_hint(folder)) if mcore else ("--adapters", _adapter_hint(folder))
            raise FileNotFoundError(f"{flag} {folder}: there is no {name} in it{hint}")
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy the adapter again") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: copy the adapter again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object. Copy the adapter again")
    for name, kinds in (("r", int), ("lora_alpha", int | float)):
        value = config.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            raise ValueError(f"{path} has {name} {value!r}, which must be a number above 0: copy the adapter again")
    return config


def _mcore_hint(folder: Path) -> str:
    parent = folder.parent
    if (parent / ADAPTER_CONFIG).is_file():
        return f". Is it {parent} that you mean?"
    return ", so it is no adapter. Set a full model as --mcore_model"


def _adapter_hint(folder: Path) -> str:
    """Return the hint in the error message for a folder without an adapter."""
    if any(folder.glob("adapter_model.bin")):
        return ". adapter_model.bin is not supported. Load it with PEFT and save it as safetensors"
    candidates = [file for prefix in ("", "*/") for file in folder.glob(f"{prefix}checkpoint-*/{ADAPTER_WEIGHTS}")]
    if candidates:
        return f". Is it {max(candidates, key=lambda file: file.stat().st_mtime).parent} that you mean?"
    if (folder / LATEST).is_file():
        return ". It is in megatron-core's format. Set it as --mcore_adapter"
    if (folder / "config.json").is_file():
        return ". It is a full model. Set it as --model"
    return ". Set the folder of an adapter in PEFT's format"


def _find_fault(config: object) -> str | None:
    """Return the reason why a config.json is invalid for any family."""
    if not isinstance(config, dict):
        return "is not a JSON object"
    text = config.get("text_config")
    if not isinstance(text, dict | None):
        return f"has text_config {text!r}, which must be an object"
    for name, value in ((name, part.get(name)) for part in (config, text or {}) for name in _COUNTS):
        if value is not None and (not isinstance(value, int) or value <= 0):
            return f"has {name} {value!r}, which must be a whole number above 0"
    for name, value in (config | (text or {})).items():
        if name.endswith("_eps") and isinstance(value, float) and not math.isfinite(value):
            return f"has {name} {value}, which must be a finite number"
    return None
