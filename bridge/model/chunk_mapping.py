"""The mapping table of a built model."""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.core.models.gpt import GPTModel

from ..families import family_of
from ..mapping.param_mapping import Architecture, Family, HfConfig, ParamTable, expand_mappings


class ChunkMapping(NamedTuple):
    """The family, architecture and table of a built model."""

    family: Family
    architecture: Architecture
    entries: ParamTable


def describe_chunks(chunks: Sequence[GPTModel], hf_config: HfConfig) -> Architecture:
    """Describe the model of a raw config.json, with as many layers of multi-token prediction as `chunks` have."""
    depths = max((len(chunk.mtp.layers) for chunk in chunks if getattr(chunk, "mtp", None)), default=0)
    return replace(family_of(hf_config).describe(hf_config), mtp_depths=depths)


def map_chunks(chunks: Sequence[GPTModel], hf_config: HfConfig, names: Container[str] = ()) -> ChunkMapping:
    """Expand the table of `chunks`. `names`: of the checkpoint's tensors, where a family has several spellings."""
    family, architecture = family_of(hf_config), describe_chunks(chunks, hf_config)
    return ChunkMapping(family, architecture, expand_mappings(family, hf_config, architecture, names))
