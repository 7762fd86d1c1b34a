"""Qwen3.5, dense: gated delta nets with separate projections, gated attention in every fourth layer.

The checkpoints on the hub are of Qwen3_5ForConditionalGeneration, with Qwen3-VL's tower without DeepStack.
"""

from dataclasses import replace
from functools import partial

from ..mapping.architecture import Architecture, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import qwen3_vl_text
from .decoder import mlp
from .gated_delta_hybrid import DEFAULTS, PROJECTED, describe_hybrid, hybrid, mtp_mappings
from .vision_tower import TOWER_NAMES, with_rope_axes
from .vlm_text import add_language_model_prefix, mrope_text_config


def architecture(config: HfConfig) -> Architecture:
    return beside_tower(describe_hybrid(config), config)


def beside_tower(decoder: Architecture, config: HfConfig) -> Architecture:
    """Return the architecture with the positions and names of a model that has a tower."""
    decoder = replace(decoder, module_names=TOWER_NAMES)
    return with_rope_axes(decoder, config, interleaved=True, sections=[11, 11, 10])


def mappings(config: HfConfig) -> list[ParamMapping]:
    return hybrid(config, PROJECTED, fp32=True) + mlp()


def vision(hf_config: HfConfig) -> Vision:
    """Return Qwen3-VL's tower, whose features enter the language model in place of embeddings only."""
    return replace(qwen3_vl_text.vision(hf_config), deep_layers=())


FAMILY = Family(
    name="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    models="Qwen3.5 and 3.6 (dense)",
    architecture=architecture,
    mappings=mappings,
    mtp_mappings=partial(mtp_mappings, mappings),
    text_config=mrope_text_config,
    vision=vision,
    vision_mappings=qwen3_vl_text.vision_mappings,
    vlm_names=(add_language_model_prefix,),
    defaults=DEFAULTS
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
)
