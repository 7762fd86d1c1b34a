"""Granite: Llama's layers, with scaling factors on the embedding, residual branches, attention scores and logits."""

from typing import Any

from ..mapping.architecture import Architecture, HfConfig, TransformerArgs
from ..mapping.param_mapping import Family
from .decoder import DEFAULTS, describe_decoder
from .llama import mappings


def architecture(config: HfConfig, settings: TransformerArgs | None = None, **fields: Any) -> Architecture:
    """Return the architecture. settings, fields: additional arguments of TransformerConfig and of Architecture."""
    bias = config["attention_bias"]
    attention = {"add_qkv_bias": bias, "softmax_scale": float(config["attention_multiplier"])}
    return describe_decoder(
        config,
        attention | (settings or {}),
        embedding_scale=float(config["embedding_multiplier"]),
        residual_scale=float(config["residual_multiplier"]),
        logits_scale=float(config["logits_scaling"]),
        output_bias=bias,
        mlp_bias=config["mlp_bias"],
        **fields,
    )


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    models="Granite 3.0 to 3.3 (dense)",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
)
