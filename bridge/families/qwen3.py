"""Qwen3: norms on query and key heads, with an explicit head size."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, QK_NORMS, attention_biases, describe_decoder, mlp, qwen_layers
from .internvl import with_tower


def architecture(config: HfConfig) -> Architecture:
    bias = config["attention_bias"]
    transformer = {"qk_layernorm": True, "add_qkv_bias": bias}
    return describe_decoder(config, transformer, output_bias=bias, layers=qwen_layers(config))


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + attention_biases(config) + QK_NORMS + mlp()


TEXT_FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    models="Qwen3 (dense); InternVL 3.5 (1B to 14B)",
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
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
)
FAMILY = with_tower(TEXT_FAMILY)
