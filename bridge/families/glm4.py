"""GLM-4-0414: norms before and behind both branches, rotary embeddings on half of a head in neighbouring dimensions."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import REPLICATED, Architecture, Family, Row
from .decoder import ATTENTION, ENDS, FUSED_MLP, HF_LAYER, LAYER, QKV_BIAS, describe_decoder, with_defaults

# transformers' Glm4Config
DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "tie_word_embeddings": False,
    "attention_bias": True,  # of queries, keys and values
    "partial_rotary_factor": 0.5,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS) | {"rope_interleaved": True}
    return replace(describe_decoder(config, settings, add_qkv_bias=settings["attention_bias"]), post_norms=True)


def rows(config: dict[str, Any]) -> list[Row]:
    return [
        *ENDS,
        *ATTENTION,
        *(QKV_BIAS if with_defaults(config, DEFAULTS)["attention_bias"] else []),
        Row(HF_LAYER + "post_self_attn_layernorm.weight", LAYER + "self_attn_bda.norm.weight", REPLICATED),
        Row(HF_LAYER + "post_mlp_layernorm.weight", LAYER + "mlp_bda.norm.weight", REPLICATED),
        *FUSED_MLP,
    ]


FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    models="GLM-4-0414, GLM-Z1",
    describe=describe,
    rows=rows,
)
