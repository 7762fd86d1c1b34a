"""Qwen3-Next: gated delta nets, in every fourth layer gated attention; many experts and a shared one."""

from dataclasses import replace
from typing import Any

from ..rows import Architecture, Family, Row
from .decoder import experts, mlp, shared_experts, with_defaults
from .hybrid import DEFAULTS as HYBRID
from .hybrid import PROJECTED_GROUPS, describe_hybrid, hybrid
from .qwen3_moe import moe_layers
from .softmax import softmax_routing

# transformers' Qwen3NextConfig
DEFAULTS = {
    **HYBRID,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    moe = moe_layers(settings) if settings["num_experts"] else ()
    return describe_moe(config, settings, moe)


def describe_moe(config: dict[str, Any], settings: dict[str, Any], moe: tuple[int, ...]) -> Architecture:
    """A hybrid whose layers `moe` have experts."""
    if not moe:
        return describe_hybrid(config, settings)
    routing, rule = softmax_routing(
        settings["num_experts"], settings["num_experts_per_tok"], normalize=settings["norm_topk_prob"]
    )
    architecture = describe_hybrid(
        config,
        settings,
        moe_ffn_hidden_size=settings["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=settings["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
        moe_layer_freq=[int(layer in moe) for layer in range(settings["num_hidden_layers"])],
        **routing,
    )
    return replace(architecture, routing=rule)


def gated_experts(moe: tuple[int, ...]) -> list[Row]:
    """Experts, and a shared one behind a gate of its own."""
    return [*experts(moe), *shared_experts("shared_expert", moe, gate=True)]


def rows(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    moe = moe_layers(settings) if settings["num_experts"] else ()
    dense = tuple(layer for layer in range(settings["num_hidden_layers"]) if layer not in moe)
    return hybrid(config, settings, PROJECTED_GROUPS, fp32=False) + mlp(dense) + gated_experts(moe)


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    models="Qwen3-Next-80B-A3B",
    describe=describe,
    rows=rows,
)
