"""Gemma 3 text: five of six layers have a window and another rope; four norms in each layer.

Norm weights are stored as differences from 1, the embedding is scaled by the square root of its width, and queries and
keys have a norm per head. From 4B on, checkpoints are Gemma3ForConditionalGeneration: only the text model is trained.
"""

import math
from dataclasses import replace

from ..mapping.param_mapping import Architecture, Family, HfConfig, ParamMapping
from .decoder import (
    DEFAULTS,
    ENDS,
    PROJECTIONS,
    QK_NORMS,
    attention_biases,
    describe_decoder,
    mlp,
    read_ropes,
    sliding_layers,
)
from .gemma2 import FOUR_NORMS
from .vlm_text import (
    NESTED_MODULES,
    TOWER_AND_PROJECTOR,
    add_language_model_prefix,
    nest_in_language_model,
    text_config,
)

GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4


def architecture(config: HfConfig) -> Architecture:
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise ValueError(f"config.json has {key} {config[key]!r}: no released Gemma 3 text model has it")
    bias, pattern = config["attention_bias"], config["sliding_window_pattern"]
    ropes = read_ropes(
        config,
        config["head_dim"],
        full_base=config.get("rope_theta") or GLOBAL_BASE,
        sliding_base=config.get("rope_local_base_freq") or LOCAL_BASE,
    )
    layers = sliding_layers(config, [(layer + 1) % pattern != 0 for layer in range(config["num_hidden_layers"])])
    return describe_decoder(
        config | {"hidden_act": config["hidden_activation"]},
        {
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
            "add_qkv_bias": bias,
        },
        ropes=ropes,
        layers=tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in layers),
        embedding_scale=math.sqrt(config["hidden_size"]),
        post_norms=True,
        output_bias=bias,
        passthrough=TOWER_AND_PROJECTOR,
        module_names=NESTED_MODULES,
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + FOUR_NORMS + PROJECTIONS + attention_biases(config) + QK_NORMS + mlp()


FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    models="Gemma 3, text",
    architecture=architecture,
    mappings=mappings,
    text_config=text_config,
    vlm_names=(nest_in_language_model, add_language_model_prefix),
    limits=(
        "soft caps on scores and logits",
        "use_bidirectional_attention",
        "images: the vision tower passes through unchanged",
    ),
    defaults=DEFAULTS
    | {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
    },
)
