"""Qwen3-Next: gated delta nets, in every fourth layer gated attention; many experts and a shared one."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import dense_layers, mlp, with_defaults
from .gated_delta_hybrid import DEFAULTS as HYBRID
from .gated_delta_hybrid import PROJECTED_GROUPS, describe_hybrid, hybrid
from .qwen2_moe import gated_experts, gated_moe
from .qwen3_moe import moe_layers

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
    transformer, rule = gated_moe(settings, moe)
    return replace(describe_hybrid(config, settings, **transformer), routing=rule)


def rows(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    moe = moe_layers(settings) if settings["num_experts"] else ()
    mixers = hybrid(config, settings, PROJECTED_GROUPS, fp32=False)
    return mixers + mlp(dense_layers(settings, moe)) + gated_experts(moe)


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    models="Qwen3-Next-80B-A3B",
    describe=describe,
    rows=rows,
)
