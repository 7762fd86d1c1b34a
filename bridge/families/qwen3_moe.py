"""Qwen3-MoE: Qwen3's attention, and in most layers experts behind a softmax router."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Layer, Row
from .decoder import (
    ATTENTION,
    ENDS,
    QK_NORMS,
    attention_biases,
    dense_layers,
    describe_decoder,
    experts,
    mlp,
    with_defaults,
)
from .softmax_moe import softmax_routing

# transformers' Qwen3MoeConfig
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    bias = bool(config.get("attention_bias"))
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    moe = moe_layers(settings)
    routing, rule = softmax_routing(
        _experts(config), settings["num_experts_per_tok"], normalize=settings["norm_topk_prob"]
    )
    architecture = describe_decoder(
        config,
        settings,
        qk_layernorm=True,
        add_qkv_bias=bias,
        moe_ffn_hidden_size=settings["moe_intermediate_size"],
        moe_layer_freq=[int(layer in moe) for layer in range(settings["num_hidden_layers"])],
        **routing,
    )
    # transformers has the window in all layers or in none, whatever layer_types and max_window_layers say.
    layers = (Layer(window=window),) * settings["num_hidden_layers"]
    return replace(architecture, routing=rule, output_bias=bias, layers=layers)


def _experts(config: dict[str, Any]) -> int:
    return config.get("num_experts", config.get("num_local_experts", 128))  # transformers 5 writes the second


def moe_layers(settings: dict[str, Any]) -> tuple[int, ...]:
    """The layers that have experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = settings["decoder_sparse_step"], settings["mlp_only_layers"]
    return tuple(i for i in range(settings["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def rows(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    moe = moe_layers(settings)
    return ENDS + ATTENTION + attention_biases(config) + QK_NORMS + mlp(dense_layers(settings, moe)) + experts(moe)


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    models="Qwen3 (MoE: 30B-A3B, 235B-A22B, Coder)",
    describe=describe,
    rows=rows,
)
