"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts, and one wide expert for all tokens behind a sigmoid gate."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Layer, Routing, Row
from .decoder import (
    ATTENTION,
    ENDS,
    QKV_BIAS,
    dense_layers,
    describe_decoder,
    experts,
    mlp,
    shared_experts,
    windowed,
    with_defaults,
)
from .qwen3_moe import moe_layers
from .softmax_moe import softmax_routing

# transformers' Qwen2MoeConfig
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "qkv_bias": True,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    moe, rule = gated_moe(settings, moe_layers(settings))
    architecture = describe_decoder(config, settings, add_qkv_bias=settings["qkv_bias"], **moe)
    return replace(architecture, routing=rule, layers=_layers(config, settings["num_hidden_layers"]))


def gated_moe(settings: dict[str, Any], moe: tuple[int, ...]) -> tuple[dict[str, Any], Routing | None]:
    """Of layers `moe` with experts and a shared one: megatron-core's settings, and the rule as `softmax_routing`."""
    routing, rule = softmax_routing(
        settings["num_experts"], settings["num_experts_per_tok"], normalize=settings["norm_topk_prob"]
    )
    return routing | {
        "moe_ffn_hidden_size": settings["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": settings["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "moe_layer_freq": [int(layer in moe) for layer in range(settings["num_hidden_layers"])],
    }, rule


def _layers(config: dict[str, Any], layers: int) -> tuple[Layer, ...]:
    """Where windows are switched on, every other one of the first max_window_layers."""
    on, last = config.get("use_sliding_window"), config.get("max_window_layers", 28)
    sliding = [on and layer % 2 == 0 and layer < last for layer in range(layers)]
    config = config if on else config | {"sliding_window": None}
    return windowed(config, layers, default=["sliding_attention" if yes else "full_attention" for yes in sliding])


def gated_experts(moe: tuple[int, ...]) -> list[Row]:
    """Experts, and a shared one behind a gate of its own."""
    return experts(moe) + shared_experts("shared_expert", moe, gate=True)


def rows(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    moe = moe_layers(settings)
    biases = QKV_BIAS if settings["qkv_bias"] else []
    return ENDS + ATTENTION + biases + mlp(dense_layers(settings, moe)) + gated_experts(moe)


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    describe=describe,
    rows=rows,
)
