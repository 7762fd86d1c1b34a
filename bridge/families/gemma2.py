"""Gemma 2: Gemma with four norms in each layer, windows in every other one, and caps on scores and logits."""

import math

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import REPLICATED, Family, ParamMapping
from .decoder import (
    DEFAULTS,
    ENDS,
    POST_NORMS,
    PROJECTIONS,
    attention_biases,
    check_supported,
    describe_decoder,
    layer_mapping,
    mlp,
    sliding_layers,
)

INPUT_NORM = layer_mapping("input_layernorm.weight", "input_layernorm.weight", REPLICATED)
PRE_MLP_NORM = layer_mapping("pre_feedforward_layernorm.weight", "pre_mlp_layernorm.weight", REPLICATED)
FOUR_NORMS = [INPUT_NORM, PRE_MLP_NORM, *POST_NORMS]


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"use_bidirectional_attention": (False,)})
    bias = config["attention_bias"]
    return describe_decoder(
        config | {"hidden_act": config["hidden_activation"]},
        {
            "layernorm_zero_centered_gamma": True,
            "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
            "add_qkv_bias": bias,
        },
        layers=sliding_layers(config, [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]),
        embedding_scale=math.sqrt(config["hidden_size"]),
        logits_cap=config.get("final_logit_softcapping", 30.0),  # null: no cap
        score_cap=config.get("attn_logit_softcapping", 50.0),
        post_norms=True,
        output_bias=bias,
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + FOUR_NORMS + PROJECTIONS + attention_biases(config) + mlp()


FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    models="Gemma 2",
    architecture=architecture,
    mappings=mappings,
    limits=("use_bidirectional_attention",),
    defaults=DEFAULTS
    | {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
    },
)
