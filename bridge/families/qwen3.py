"""Qwen3: norms on query and key heads, whose size is a setting of its own."""

from typing import Any

from ..rows import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, QK_NORMS, describe_decoder, mlp, refuse_sliding_window, with_defaults

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
    refuse_attention_bias(config)
    refuse_sliding_window(config, settings["num_hidden_layers"], first=config.get("max_window_layers", 28))
    return describe_decoder(config, settings, qk_layernorm=True)


def refuse_attention_bias(config: dict[str, Any]) -> None:
    if config.get("attention_bias"):
        raise ValueError(
            "config.json has attention_bias true: megatron-core puts a bias on the attention's output only "
            "together with biases in the MLP, which Qwen3 has not"
        )


def rows(config: dict[str, Any]) -> list[Row]:
    return ENDS + ATTENTION + QK_NORMS + mlp()


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    models="Qwen3 (dense)",
    describe=describe,
    rows=rows,
    limits=(
        "attention_bias",
        "sliding windows (use_sliding_window)",
        "rope scaling other than linear and llama3 (YaRN)",
    ),
)
