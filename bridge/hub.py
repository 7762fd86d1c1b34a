"""From `--model` to a folder (local as it is, else downloaded from Hugging Face or ModelScope) and its config.json."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from .options import ModelOptions

# Weights in other formats, and what is no part of a model.
_IGNORED = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx", "original/*", "figures/*"]


def model_folder(options: ModelOptions, *, weights: bool = True) -> Path:
    """The folder of `--model`; a hub's, without `weights`, holds its small files alone.

    Raises FileNotFoundError or ImportError with a cure; errors of the hub pass through.
    """
    name = options.model
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"--model {name}: no such folder (a hub's model is named owner/name)")
    ignored = _IGNORED if weights else [*_IGNORED, "*.safetensors"]
    if options.use_hf:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(name, revision=options.model_revision, token=options.hub_token, ignore_patterns=ignored)
        )
    if importlib.util.find_spec("modelscope") is None:
        raise ImportError(
            f"--model {name} is no local folder. Give --use_hf true to take it from Hugging Face, "
            "or `pip install modelscope` to take it from ModelScope"
        )
    from modelscope import snapshot_download as modelscope_download  # type: ignore[import-not-found]

    return Path(
        modelscope_download(name, revision=options.model_revision, token=options.hub_token, ignore_patterns=ignored)
    )


def read_config(folder: str | Path) -> dict[str, Any]:
    """The raw config.json of a checkpoint's folder. Raises FileNotFoundError or ValueError with a cure."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"--model {folder}: no config.json there, so it is no Hugging Face checkpoint")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): copy it again from the original checkpoint") from None
