"""Seed-OSS: Llama's layers, with biases on the query, key and value projections."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, OUTPUT_BIAS, QKV_BIAS, describe_decoder, mlp, mlp_biases


def architecture(config: HfConfig) -> Architecture:
    transformer = {"add_qkv_bias": config["attention_bias"]}
    return describe_decoder(config, transformer, output_bias=config["attention_out_bias"], mlp_bias=config["mlp_bias"])


def mappings(config: HfConfig) -> list[ParamMapping]:
    biases = (QKV_BIAS if config["attention_bias"] else []) + (OUTPUT_BIAS if config["attention_out_bias"] else [])
    return ENDS + ATTENTION + biases + mlp() + mlp_biases(config)


FAMILY = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    models="Seed-OSS 36B",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 155136,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
    },
)
