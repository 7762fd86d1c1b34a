"""Qwen3: norms on query and key heads, whose size is a setting of its own."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, QK_NORMS, attention_biases, describe_decoder, mlp, qwen_windows, with_defaults

# transformers' Qwen3Config
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    bias = bool(config.get("attention_bias"))
    architecture = describe_decoder(config, settings, qk_layernorm=True, add_qkv_bias=bias)
    layers = qwen_windows(config, settings["num_hidden_layers"])
    return replace(architecture, output_bias=bias, layers=layers)


def rows(config: dict[str, Any]) -> list[Row]:
    return ENDS + ATTENTION + attention_biases(config) + QK_NORMS + mlp()


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    models="Qwen3 (dense)",
    describe=describe,
    rows=rows,
)
