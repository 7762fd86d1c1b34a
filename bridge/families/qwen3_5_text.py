"""Qwen3.5, dense: gated delta nets with separate projections, gated attention in every fourth layer.

The checkpoints on the hub are of Qwen3_5ForConditionalGeneration: only their text model is trained.
"""

from ..mapping.param_mapping import Architecture, Family, HfConfig, ParamMapping
from .decoder import mlp
from .gated_delta_hybrid import DEFAULTS, PROJECTED, describe_hybrid, hybrid
from .vlm_text import add_language_model_prefix, mrope_text_config


def architecture(config: HfConfig) -> Architecture:
    return describe_hybrid(config)


def mappings(config: HfConfig) -> list[ParamMapping]:
    return hybrid(config, PROJECTED, fp32=True) + mlp()


FAMILY = Family(
    name="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    models="Qwen3.5 and 3.6 (dense), text",
    architecture=architecture,
    mappings=mappings,
    text_config=mrope_text_config,
    vlm_names=(add_language_model_prefix,),
    limits=("images and videos: the vision tower passes through unchanged",),
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
