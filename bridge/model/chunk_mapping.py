"""Mapping table of a built model."""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.core.models.gpt import GPTModel

from ..families import family_of
from ..layers.tower_part import TowerPart
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamTable, expand_mappings


class ChunkMapping(NamedTuple):
    """Family, architecture and table of a built model."""

    family: Family
    architecture: Architecture
    entries: ParamTable


def describe_chunks(chunks: Sequence[GPTModel], hf_config: HfConfig) -> Architecture:
    """Return the architecture in a raw config.json, with the tower and prediction layers that the model has."""
    depths: int = chunks[0].config.architecture.mtp_depths if chunks else 0  # type: ignore[attr-defined]
    has_vision = any(isinstance(chunk, TowerPart) for chunk in chunks)
    return replace(family_of(hf_config).describe(hf_config, vision=has_vision), mtp_depths=depths)


def map_chunks(chunks: Sequence[GPTModel], hf_config: HfConfig, names: Container[str] = ()) -> ChunkMapping:
    """Expand the table of `chunks`. names: the checkpoint's tensors, if the family has several mappings for one."""
    family, architecture = family_of(hf_config), describe_chunks(chunks, hf_config)
    return ChunkMapping(family, architecture, expand_mappings(family, hf_config, architecture, names))
