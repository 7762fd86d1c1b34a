"""Checks of a Hugging Face folder's tensor names against its config.json."""

from collections.abc import Container, Iterable
from pathlib import Path

from ..families import family_of
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import ParamKey, ParamTable, expand_mappings
from .conversion_report import unmapped_reasons
from .hub import INDEX
from .passthrough import passthrough_names
from .quantized import WeightSource, open_weights, quantization_of
from .safetensors_io import unindexed_files

HINT = "Do weights and config.json belong together?"


def check_folder_names(folder: Path, hf_config: HfConfig) -> None:
    """Raise ValueError if the folder's tensors are not exactly those of the model in `hf_config`. Reads headers only.

    Skips unsupported families and quantizations.
    """
    try:
        family = family_of(hf_config)
    except ValueError:
        return
    if quantization_of(hf_config).get("quant_method") not in (None, "fp8", "mxfp4", "compressed-tensors"):
        return
    architecture = family.describe(hf_config)
    source = open_weights(folder, hf_config)
    entries = expand_mappings(family, hf_config, architecture, source.tensors)
    check_names(source, set(), entries, architecture, family.name)


def check_names(
    source: WeightSource,
    initialized: Container[ParamKey],
    entries: ParamTable,
    architecture: Architecture,
    family: str,
) -> None:
    """Raise ValueError if `source` lacks a tensor of `entries` or has an unexpected one.

    initialized: keys that are not read from the checkpoint.
    """
    names = {name for key, entry in entries.items() if key not in initialized for name in entry.hf}
    if missing := names - source.tensors.keys():
        fix = HINT
        if files := unindexed_files(source.folder):
            fix = f"{INDEX} does not name {', '.join(files)}, which is there: download the model again"
        raise ValueError(
            f"{source.folder} lacks {abridge(missing)}, which a {family} model of this config.json has. {fix}"
        )
    extra = source.tensors.keys() - names
    if extra := extra - unmapped_reasons(extra, architecture).keys() - passthrough_names(extra, architecture):
        raise ValueError(
            f"{source.folder} has {abridge(extra)}, which a {family} model of this config.json has no place for. {HINT}"
        )


def shape_mismatch(file: Path, name: str, stored: Iterable[int], described: Iterable[int]) -> str:
    """Return the error message for a tensor whose stored shape differs from the one that config.json describes."""
    return f"{file}: {name} has shape {list(stored)}, and by config.json it has {list(described)}. {HINT}"


def abridge(names: Iterable[str]) -> str:
    """Return the number of tensors and the first few names, for error messages."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:5]) + (", ..." if len(ordered) > 5 else "")
    return f"{len(ordered)} tensor{'s' if len(ordered) > 1 else ''} ({shown})"
