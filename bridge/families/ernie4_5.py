"""ERNIE 4.5 (dense): Llama's layers, with rotary embeddings in neighbouring dimensions."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, MLP_BIASES, OUTPUT_BIAS, QKV_BIAS, describe_decoder, mlp, with_defaults

# transformers' Ernie4_5Config
DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "use_bias": False,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS) | {"rope_interleaved": True}
    bias = settings["use_bias"]
    return replace(describe_decoder(config, settings, add_qkv_bias=bias), output_bias=bias, mlp_bias=bias)


def rows(config: dict[str, Any]) -> list[Row]:
    biases = QKV_BIAS + OUTPUT_BIAS + MLP_BIASES if config.get("use_bias") else []
    return ENDS + ATTENTION + mlp() + biases


FAMILY = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),  # the second in the first files
    models="ERNIE 4.5 0.3B (the PT files)",
    describe=describe,
    rows=rows,
)
