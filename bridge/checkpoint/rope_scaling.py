"""Rope scaling of `--rope_scaling` and `--max_model_len`, written into a model's config.json. Imports no torch."""

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path

from ..families import family_of
from ..families.config_file import lift_config, lower_config
from ..mapping.architecture import HfConfig
from ..options import ModelOptions

TYPES = ("yarn", "linear", "llama3", "default")
KEYS = (
    "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "rope_theta",
)  # fmt: skip
LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor")
KEPT = ("rope_theta", "partial_rotary_factor")  # keys of rope_parameters that scaling does not change


def scale_rope(config: HfConfig, options: ModelOptions) -> HfConfig:
    """Return a raw config.json with the options' rope scaling and number of positions.

    Raises ValueError, naming the flag, if the model or this version does not support it.
    """
    if not options.rope_scaling and options.max_model_len is None:
        return config
    text = config.get("text_config") or config
    if not (positions := text.get("max_position_embeddings")):
        flag = "rope_scaling" if options.rope_scaling else "max_model_len"
        raise ValueError(f"--{flag}: config.json has no max_position_embeddings to change. Remove it.")
    if options.rope_scaling:
        changes = _rope_changes(text, options.rope_scaling, options.max_model_len, positions)
    else:
        changes = {"max_position_embeddings": options.max_model_len}
    scaled = config | ({"text_config": text | changes} if config.get("text_config") else changes)
    if options.rope_scaling:
        _check_supported(scaled, options)
    return scaled


def _rope_changes(text: HfConfig, scaling: HfConfig, length: int | None, positions: int) -> HfConfig:
    flag = f"--rope_scaling {json.dumps(scaling)}"
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind not in TYPES:
        reason = ", whose frequencies change with the longest text so far" if kind == "dynamic" else ""
        raise ValueError(f"{flag}: no support for type {kind}{reason}. Set one of {', '.join(TYPES)}.")
    if unknown := next((key for key in scaling if key not in KEYS), None):
        raise ValueError(f"{flag}: {unknown} is no key of rope scaling. Remove it.")
    if kind == "llama3" and (missing := next((key for key in LLAMA3_KEYS if key not in scaling), None)):
        raise ValueError(f"{flag}: {missing} is missing. Add it.")
    key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    current = dict(text.get(key) or {})
    if any(isinstance(value, dict) for value in current.values()) or "rope_local_base_freq" in text:
        raise ValueError(f"{flag}: the model's layers have several ropes. Remove it.")
    original = scaling.get("original_max_position_embeddings") or _original_positions(text, current, positions)
    values = {name: current[name] for name in KEPT if name in current}
    values |= {name: value for name, value in scaling.items() if name != "type"} | {"rope_type": kind}
    if kind != "default":
        values["factor"] = _factor(flag, scaling.get("factor"), length, original)
    if kind in ("yarn", "llama3"):
        values["original_max_position_embeddings"] = original
    scaled_length = length or int(original * values.get("factor", 1))
    # transformers reads rope_theta from where it is: beside rope_scaling, or in rope_parameters.
    return {key: values, "max_position_embeddings": scaled_length}


def _original_positions(text: HfConfig, current: HfConfig, positions: int) -> int:
    """Return the number of positions before any scaling in config.json."""
    if original := current.get("original_max_position_embeddings") or text.get("original_max_position_embeddings"):
        return original
    return int(positions // current["factor"]) if current.get("factor") else positions


def _factor(flag: str, factor: object, length: int | None, original: int) -> float:
    if factor is None:
        if length is None:
            raise ValueError(
                f'{flag}: needs a factor. Set --max_model_len, or \'{{"rope_type": "yarn", "factor": 4.0}}\'.'
            )
        return max(float(math.ceil(length / original)), 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
        raise ValueError(f"{flag}: factor {factor!r} is no number of at least 1. Set one.")
    return float(factor)


def _check_supported(config: HfConfig, options: ModelOptions) -> None:
    flag = f"--rope_scaling {json.dumps(options.rope_scaling)}"
    ropes = family_of(config).describe(config).ropes
    if len(ropes) != 1:
        raise ValueError(f"{flag}: the model has {len(ropes)} ropes, and one can be scaled. Remove it.")


def scaled_folder(folder: Path, options: ModelOptions) -> Path:
    """Return a folder that has the scaled config.json, for engines that read it; `folder` itself without scaling.

    The other files are links. It is removed when the process ends.
    """
    if not options.rope_scaling and options.max_model_len is None:
        return folder
    config = lift_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    scaled = lower_config(scale_rope(config, options))
    return _linked_folder(folder.absolute(), json.dumps(scaled, indent=2, ensure_ascii=False))


@functools.cache
def _linked_folder(folder: Path, config: str) -> Path:
    linked = Path(tempfile.mkdtemp(prefix="megaswift-rope-"))
    atexit.register(shutil.rmtree, linked, ignore_errors=True)
    for entry in folder.iterdir():
        if entry.name != "config.json":
            (linked / entry.name).symlink_to(entry)
    (linked / "config.json").write_text(config + "\n", encoding="utf-8")
    return linked
