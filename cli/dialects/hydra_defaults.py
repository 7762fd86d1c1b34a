"""Hydra's list `defaults` of a config: files beside it, whose keys it has unless it sets them itself."""

from pathlib import Path
from typing import Any

HERE = ("", "_here_", "_global_")  # packages: the keys of the file are keys of the root
PRESETS = "deepspeed_"  # files of such names have settings of DeepSpeed, to which `${...}` leads: nothing here
DEEPEST = 10  # files that name files


def with_defaults(config: Any, folder: Path, depth: int = 0) -> Any:
    """Return a config with the keys of the files that its `defaults` name. Those that are not there stay in the list.

    Raises what reading a file raises.
    """
    from omegaconf import OmegaConf

    items: Any = config.get("defaults")
    if not OmegaConf.is_list(items) or depth == DEEPEST:
        return config
    base: Any = OmegaConf.create()
    others = []
    for item in items:
        name, _, package = str(item).partition("@")
        file = folder / f"{name}.yaml"
        if package in HERE and isinstance(item, str) and file.is_file():
            loaded = OmegaConf.load(file)
            if OmegaConf.is_dict(loaded):
                base = OmegaConf.merge(base, with_defaults(loaded, file.parent, depth + 1))
        elif isinstance(item, str) and (preset := name.rpartition("/")[2]).startswith(PRESETS):
            base = OmegaConf.merge(base, {preset: {}})
        else:
            others.append(item)
    del config["defaults"]
    result: Any = OmegaConf.merge(base, config)
    if others:
        result["defaults"] = others
    return result
