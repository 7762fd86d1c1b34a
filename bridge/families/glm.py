"""GLM-4-9B: rotary embeddings on adjacent dimensions of half a head, and fused gates."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from . import glm4
from .decoder import ATTENTION, ENDS, FUSED_MLP, QKV_BIAS, describe_decoder


def architecture(config: HfConfig) -> Architecture:
    transformer = {"add_qkv_bias": config["attention_bias"]}
    return describe_decoder(config, transformer, interleaved=True, partial_rotary=True)


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + (QKV_BIAS if config["attention_bias"] else []) + FUSED_MLP


FAMILY = Family(
    name="glm",
    architectures=("GlmForCausalLM",),
    models="GLM-4-9B (the hf files), GLM-Edge 1.5B and 4B",
    architecture=architecture,
    mappings=mappings,
    defaults=glm4.FAMILY.defaults,
)
