"""Llama: no biases as a rule, head_dim optional; Llama 3.1 and later scale their rotary embeddings."""

from typing import Any

from ..rows import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, OTHER_BIASES, QKV_BIAS, describe_decoder, mlp, with_defaults

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
    return describe_decoder(config, with_defaults(config, DEFAULTS), add_bias_linear=_biases(config))


def _biases(config: dict[str, Any]) -> bool:
    attention, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention != mlp_bias:
        raise ValueError(
            f"config.json has attention_bias {attention} and mlp_bias {mlp_bias}: megatron-core has biases in all "
            "linear layers or in none, so the two must be the same"
        )
    return attention


def rows(config: dict[str, Any]) -> list[Row]:
    return ENDS + ATTENTION + mlp() + (QKV_BIAS + OTHER_BIASES if _biases(config) else [])


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    models="Llama 2, 3, 3.1, 3.2 (text), 3.3, and models of its shape such as SmolLM2",
    describe=describe,
    rows=rows,
    limits=("attention_bias and mlp_bias that differ", "rope scaling other than linear and llama3"),
)
