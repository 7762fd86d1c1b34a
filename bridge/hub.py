"""From `--model` to a folder (local as it is, else downloaded from Hugging Face or ModelScope) and its config.json."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from .options import ModelOptions

LATEST = "latest_checkpointed_iteration.txt"  # Megatron-LM: which subfolder of a megatron-core checkpoint is meant

# Weights in other formats (consolidated: Mistral's own, beside the same in transformers'), and what is no part of a
# model.
_IGNORED = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx", "consolidated*.safetensors"]
_IGNORED += ["original/*", "figures/*"]
_COUNTS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_COUNTS += ("head_dim", "vocab_size", "max_position_embeddings")
_TOKENIZERS = ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tokenization*.py"]


def model_folder(options: ModelOptions, *, weights: bool = True) -> Path:
    """The folder of `--model`; a hub's, without `weights`, holds its small files alone.

    Raises FileNotFoundError, ImportError or (where a hub does not give it) OSError, each with a cure.
    """
    name = options.model
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"--model {name}: no such folder (a hub's model is named owner/name)")
    ignored = _IGNORED if weights else [*_IGNORED, "*.safetensors"]
    if options.use_hf:
        hub = "Hugging Face"
        from huggingface_hub import snapshot_download
    else:
        hub = "ModelScope"
        if importlib.util.find_spec("modelscope") is None:
            raise ImportError(
                f"--model {name} is no local folder. Give --use_hf true to take it from Hugging Face, "
                "or `pip install modelscope` to take it from ModelScope"
            )
        from modelscope import snapshot_download  # type: ignore[import-not-found]
    try:
        return Path(
            snapshot_download(name, revision=options.model_revision, token=options.hub_token, ignore_patterns=ignored)
        )
    except Exception as error:  # whatever the hub's client raises: the user needs the name and the reason
        reason = " ".join(str(error).split())
        raise OSError(
            f"--model {name}: {hub} did not give it ({reason}). Look at the name, the network and, for a model that "
            "is not public, --hub_token; or give a folder"
        ) from error


def source_folder(options: ModelOptions, mcore_model: str | None) -> Path:
    """The folder with config.json, tokenizer and weights: `--mcore_model` where it is given, else `--model`'s.

    Raises what `mcore_folder` and `model_folder` raise.
    """
    if not mcore_model:
        return model_folder(options)
    folder = Path(mcore_model).expanduser()
    mcore_folder(folder)
    return folder


def mcore_folder(folder: str | Path) -> Path:
    """Where the files of a megatron-core checkpoint are: in `folder`, or in what Megatron-LM's tracker file names.

    Raises FileNotFoundError or ValueError where there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"--mcore_model {folder}: no such folder. Give that of a megatron-core checkpoint")
    tracker, inside = folder / LATEST, folder
    if tracker.is_file():
        text = tracker.read_text(errors="replace").strip()
        if text != "release" and not text.isdigit():
            raise ValueError(f"{tracker} says {text!r}: the number of an iteration, or release, is needed")
        inside = folder / (text if text == "release" else f"iter_{int(text):07}")
        if not inside.is_dir():
            raise ValueError(f"{tracker} says {text}, and there is no {inside.name} beside it: copy the folder again")
    lacking = [name for name in (".metadata", "metadata.json") if not (inside / name).is_file()]
    if not lacking:
        _check_format(inside / "metadata.json")
        return inside
    hint = ""
    if any(inside.glob("*.distcp")):
        hint = f": {inside.name} has *.distcp files, and no {' nor '.join(lacking)}. Copy the folder again"
    elif any(inside.glob("mp_rank_00*")):
        hint = ". It is in Megatron-LM's older format: save it by Megatron-LM with --ckpt-format torch_dist"
    elif any(inside.glob("*.safetensors")):
        hint = ". It is a Hugging Face checkpoint: give it as --model"
    elif found := sorted(
        (file for name in (f"*/{LATEST}", f"*/*/{LATEST}", "*/metadata.json") for file in folder.glob(name)),
        key=lambda file: file.stat().st_mtime,
    ):
        hint = f". Is it {found[-1].parent} that you mean?"
        if found[-1].name != LATEST and (folder / "config.json").is_file():
            hint = f". {found[-1].parent.name} is, and no {LATEST} that names it: write the iteration's number there"
    raise ValueError(f"--mcore_model {folder}: no megatron-core distributed checkpoint there{hint}")


def _check_format(path: Path) -> None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not tell the checkpoint's format ({error!r}): copy the folder again") from None
    if stored != "torch_dist":
        raise ValueError(f"{path} tells of the format {stored!r}: save it by Megatron-LM with --ckpt-format torch_dist")


def read_config(folder: str | Path, *, mcore: bool = False) -> dict[str, Any]:
    """The raw config.json of a checkpoint's folder (`mcore`: of `--mcore_model`).

    Raises FileNotFoundError or ValueError with a cure.
    """
    path = Path(folder) / "config.json"
    if mcore and not path.is_file():
        above = f" Is it {path.parents[1]} that you mean?" if (path.parents[1] / "config.json").is_file() else ""
        raise FileNotFoundError(
            f"--mcore_model {folder}: no config.json there. Copy it and the tokenizer's files from the "
            f"model's Hugging Face checkpoint into it.{above}"
        )
    if not path.is_file():
        inside = [file for above in ("", "*/") for file in Path(folder).glob(f"{above}checkpoint-*/config.json")]
        inside.sort(key=lambda file: file.stat().st_mtime)
        hint = f". Is it {inside[-1].parent} that you mean?" if inside else ""
        raise FileNotFoundError(f"--model {folder}: no config.json there, so it is no Hugging Face checkpoint{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy it again from the original checkpoint") from None
    if fault := _fault(config):
        raise ValueError(f"{path} {fault}: copy it again from the original checkpoint")
    return config


def _fault(config: Any) -> str | None:
    """What makes of a config.json one that no model has, whatever its family."""
    if not isinstance(config, dict):
        return "is no JSON object"
    text = config.get("text_config")
    if not isinstance(text, dict | None):
        return f"has text_config {text!r}, and it must be an object"
    for name, value in ((name, part.get(name)) for part in (config, text or {}) for name in _COUNTS):
        if value is not None and (not isinstance(value, int) or value <= 0):
            return f"has {name} {value!r}, and it must be a whole number above 0"
    return None


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a checkpoint's folder. Raises FileNotFoundError or ValueError with a cure."""
    if not any(
        file for pattern in _TOKENIZERS for file in folder.glob(pattern)
    ):  # transformers would make an empty one
        raise FileNotFoundError(f"{folder}: no tokenizer there: copy {_TOKENIZERS[0]} from the original checkpoint")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of any kind: broken JSON, a class that this transformers does not know
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{folder}: its tokenizer cannot be read ({reason}): copy its files again from the original checkpoint"
        ) from error
