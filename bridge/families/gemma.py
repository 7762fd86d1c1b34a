"""Gemma: norm weights that are differences from 1, and an embedding scaled by the square root of its width."""

import math

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, attention_biases, check_supported, describe_decoder, mlp


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"use_bidirectional_attention": (False,)})
    bias = config["attention_bias"]
    return describe_decoder(
        config,
        {"layernorm_zero_centered_gamma": True, "add_qkv_bias": bias},
        embedding_scale=math.sqrt(config["hidden_size"]),
        output_bias=bias,
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + attention_biases(config) + mlp()


FAMILY = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    models="Gemma and CodeGemma",
    architecture=architecture,
    mappings=mappings,
    limits=("use_bidirectional_attention",),
    defaults=DEFAULTS
    | {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
)
