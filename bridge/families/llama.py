"""Llama: no biases as a rule, head_dim optional; Llama 3.1 and later scale their rotary embeddings."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, MLP_BIASES, attention_biases, describe_decoder, mlp, with_defaults

# transformers' LlamaConfig
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    bias = bool(config.get("attention_bias"))
    architecture = describe_decoder(config, settings, add_qkv_bias=bias)
    return replace(architecture, output_bias=bias, mlp_bias=bool(config.get("mlp_bias")))


def rows(config: dict[str, Any]) -> list[Row]:
    return ENDS + ATTENTION + attention_biases(config) + mlp() + (MLP_BIASES if config.get("mlp_bias") else [])


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    models="Llama 2, 3, 3.1, 3.2 (text), 3.3, and models of its shape such as SmolLM2",
    describe=describe,
    rows=rows,
)
