"""ERNIE 4.5 with experts: some experts for all tokens, the others behind a softmax router with a bias on the choice."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import REPLICATED, Architecture, Family, Routing, Row
from .decoder import (
    ATTENTION,
    ENDS,
    HF_LAYER,
    LAYER,
    check_known,
    describe_decoder,
    experts,
    mlp,
    shared_experts,
    with_defaults,
)

# transformers' Ernie4_5_MoeConfig
DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
# What Baidu's own configs say, and the one value that transformers' class knows.
KNOWN = {"moe_gate_act": ("softmax",), "moe_use_aux_free": (True,)}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    if config.get("use_bias"):
        raise ValueError(
            "config.json has use_bias true: megatron-core's shared experts have no biases. No released ERNIE 4.5 has it"
        )
    check_known(config, KNOWN)
    moe = _moe_layers(settings)
    shared = settings["moe_num_shared_experts"] * settings["moe_intermediate_size"]
    architecture = describe_decoder(
        config,
        settings | {"rope_interleaved": True},
        num_moe_experts=settings["moe_num_experts"],
        moe_router_topk=settings["moe_k"],
        moe_router_score_function="softmax",
        moe_router_pre_softmax=True,
        moe_ffn_hidden_size=settings["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=shared or None,
        moe_layer_freq=[int(layer in moe) for layer in range(settings["num_hidden_layers"])],
    )
    return replace(
        architecture,
        routing=Routing(smallest_sum=settings["moe_norm_min"], choice_bias=True, fp32=True),
        carried=r"model\.mtp_",
    )


def _moe_layers(settings: dict[str, Any]) -> tuple[int, ...]:
    last = settings["num_hidden_layers"] - 1
    end = last if settings["moe_layer_end_index"] == -1 else min(last, settings["moe_layer_end_index"])
    steps = range(settings["moe_layer_start_index"], end + 1)
    return tuple(layer for layer in steps if (layer + 1) % settings["moe_layer_interval"] == 0)


def rows(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    moe = _moe_layers(settings)
    dense = tuple(layer for layer in range(settings["num_hidden_layers"]) if layer not in moe)
    router, *others = experts(moe)
    bias = Row(
        HF_LAYER + "mlp.moe_statics.e_score_correction_bias",
        LAYER + "mlp.router.expert_bias",
        REPLICATED,
        moe,
        fp32=True,
    )
    shared = shared_experts("shared_experts", moe) if settings["moe_num_shared_experts"] else []
    return ENDS + ATTENTION + mlp(dense) + [replace(router, fp32=True), bias, *others] + shared


FAMILY = Family(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    models="ERNIE 4.5 21B-A3B, 300B-A47B (text)",
    describe=describe,
    rows=rows,
    limits=("use_bias",),
)
