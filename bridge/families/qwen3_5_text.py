"""Qwen3.5, dense: gated delta nets with a matrix for each projection, gated attention in every fourth layer.

The checkpoints on the hub are of Qwen3_5ForConditionalGeneration: their text model is what is trained.
"""

from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import mlp, with_defaults
from .gated_delta_hybrid import DEFAULTS as HYBRID
from .gated_delta_hybrid import PROJECTED, describe_hybrid, hybrid
from .vlm_text import inner, spelled, text_config

# transformers' Qwen3_5TextConfig
DEFAULTS = {
    **HYBRID,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


def seen_as_text(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a config.json, without what of it says how images are placed."""
    text = dict(text_config(config))
    for key in ("rope_parameters", "rope_scaling"):
        if text.get(key):
            # Of text all three positions of multimodal rotary embeddings are the same.
            text[key] = {name: value for name, value in text[key].items() if not name.startswith("mrope_")}
    return text


def describe(config: dict[str, Any]) -> Architecture:
    text = seen_as_text(config)
    return describe_hybrid(text, with_defaults(text, DEFAULTS))


def rows(config: dict[str, Any]) -> list[Row]:
    text = seen_as_text(config)
    return spelled(config, hybrid(text, with_defaults(text, DEFAULTS), PROJECTED, fp32=True) + mlp(), inner)


FAMILY = Family(
    name="qwen3_5_text",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    models="Qwen3.5 (dense), text",
    describe=describe,
    rows=rows,
    limits=("images and videos: the vision tower is carried along unchanged",),
)
