"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, QKV_BIAS, describe_decoder, mlp, qwen_layers
from .internvl import with_tower


def architecture(config: HfConfig) -> Architecture:
    return describe_decoder(config, {"add_qkv_bias": True}, layers=qwen_layers(config))


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + QKV_BIAS + mlp()


TEXT_FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    models="Qwen2, Qwen2.5 and their Math and Coder models, QwQ, R1-Distill-Qwen; InternVL 3",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
)
FAMILY = with_tower(TEXT_FAMILY)
