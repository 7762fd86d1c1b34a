"""GLM-4.5 and 4.6: grouped queries of which half of each head turns, and DeepSeek-V3's experts."""

from dataclasses import replace
from functools import partial
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, QK_NORMS, QKV_BIAS, describe_decoder, with_defaults
from .deepseek_moe import feed_forward, predicting_layers, predicting_rows, sigmoid_routing

# transformers' Glm4MoeConfig
DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    routing, rule = sigmoid_routing(config, settings)
    architecture = describe_decoder(
        config,
        settings,
        add_qkv_bias=bool(settings["attention_bias"]),  # there is none on the output
        qk_layernorm=bool(settings["use_qk_norm"]),
        **routing,
    )
    return replace(architecture, routing=rule, carried=predicting_layers(config, settings))


def rows(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    biases = QKV_BIAS if settings["attention_bias"] else []
    norms = QK_NORMS if settings["use_qk_norm"] else []
    return ENDS + ATTENTION + biases + norms + feed_forward(settings, bias=True)


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    describe=describe,
    rows=rows,
    predicting_rows=partial(predicting_rows, rows, DEFAULTS["num_hidden_layers"]),
    limits=("scoring_func other than sigmoid", "topk_method other than noaux_tc"),
)
