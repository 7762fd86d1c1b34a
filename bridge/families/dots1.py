"""dots.llm1: Qwen3's attention, and DeepSeek-V3's experts."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, QK_NORMS, attention_biases, describe_decoder, windowed, with_defaults
from .deepseek_moe import feed_forward, sigmoid_routing

# transformers' Dots1Config
DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "first_k_dense_replace": 0,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "max_window_layers": 62,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    bias = bool(config.get("attention_bias"))
    for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        if settings[key] is None:
            raise ValueError(f"config.json has no {key}, which dots.llm1 has no default for")
    routing, rule = sigmoid_routing(config, settings)
    architecture = describe_decoder(config, settings, qk_layernorm=True, add_qkv_bias=bias, **routing)
    layers, first = settings["num_hidden_layers"], settings["max_window_layers"]
    windows = config.get("sliding_window", 4096) is not None
    kinds = ["sliding_attention" if windows and layer >= first else "full_attention" for layer in range(layers)]
    return replace(architecture, routing=rule, output_bias=bias, layers=windowed(config, layers, default=kinds))


def rows(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    return ENDS + ATTENTION + attention_biases(config) + QK_NORMS + feed_forward(settings, bias=True)


FAMILY = Family(
    name="dots1",
    architectures=("Dots1ForCausalLM",),
    models="dots.llm1",
    describe=describe,
    rows=rows,
    limits=("scoring_func other than sigmoid", "topk_method other than noaux_tc"),
)
