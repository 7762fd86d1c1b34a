"""Mistral: Llama's layers, all of which attend to a sliding window where config.json gives one."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Layer, Row
from .decoder import ATTENTION, ENDS, describe_decoder, mlp, with_defaults

# transformers' MistralConfig
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    if len(set(config.get("layer_types") or [])) > 1:
        raise ValueError(
            "config.json has layer_types that differ, which transformers' Mistral ignores: its layers all have the "
            "window of sliding_window. Remove layer_types"
        )
    window = config.get("sliding_window", 4096)  # null: none
    layers = (Layer(window=window),) * settings["num_hidden_layers"]
    return replace(describe_decoder(config, settings), layers=layers)


def rows(config: dict[str, Any]) -> list[Row]:
    return ENDS + ATTENTION + mlp()


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    models="Mistral 7B, Nemo, Small (up to 3.0), Large",
    describe=describe,
    rows=rows,
    limits=("layer_types that differ (transformers' class ignores them)",),
)
