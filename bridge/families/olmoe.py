"""OLMoE: norms over all query heads and over all key heads, and in every layer experts behind a softmax router."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, QK_NORMS, attention_biases, check_known, describe_decoder, experts, with_defaults
from .softmax_moe import softmax_routing

# transformers' OlmoeConfig
DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    check_known(config, {"clip_qkv": (False,)})
    bias = bool(config.get("attention_bias"))
    routing, rule = softmax_routing(
        settings["num_experts"], settings["num_experts_per_tok"], normalize=settings["norm_topk_prob"]
    )
    architecture = describe_decoder(
        config,
        settings,
        add_qkv_bias=bias,
        qk_layernorm=True,
        moe_ffn_hidden_size=settings["intermediate_size"],
        **routing,
    )
    return replace(architecture, routing=rule, output_bias=bias, qk_norm="all")


def rows(config: dict[str, Any]) -> list[Row]:
    return ENDS + ATTENTION + attention_biases(config) + QK_NORMS + experts()


FAMILY = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    models="OLMoE-1B-7B",
    describe=describe,
    rows=rows,
    limits=("clip_qkv",),
)
