"""Granite: Llama's layers, with factors on the embedding, the branches, the attention scores and the logits."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, MLP_BIASES, attention_biases, describe_decoder, mlp, with_defaults

# transformers' GraniteConfig
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "head_dim": None,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    bias = bool(config.get("attention_bias"))
    architecture = describe_decoder(
        config, settings, add_qkv_bias=bias, softmax_scale=float(settings["attention_multiplier"])
    )
    return replace(
        architecture,
        embedding_scale=float(settings["embedding_multiplier"]),
        residual_scale=float(settings["residual_multiplier"]),
        logits_scale=float(settings["logits_scaling"]),
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
    )


def rows(config: dict[str, Any]) -> list[Row]:
    return ENDS + ATTENTION + attention_biases(config) + mlp() + (MLP_BIASES if config.get("mlp_bias") else [])


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    models="Granite 3.0 to 3.3 (dense)",
    describe=describe,
    rows=rows,
)
