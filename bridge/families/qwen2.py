"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, QKV_BIAS, describe_decoder, mlp, qwen_windows, with_defaults

# transformers' Qwen2Config
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    architecture = describe_decoder(config, settings, add_qkv_bias=True)
    return replace(architecture, layers=qwen_windows(config, settings["num_hidden_layers"]))


def rows(config: dict[str, Any]) -> list[Row]:
    return ENDS + ATTENTION + QKV_BIAS + mlp()


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    models="Qwen2, Qwen2.5 and their Math and Coder models, QwQ",
    describe=describe,
    rows=rows,
)
