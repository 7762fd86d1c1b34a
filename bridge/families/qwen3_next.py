"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts and a shared expert."""

from functools import partial

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import dense_layers, mlp
from .gated_delta_hybrid import DEFAULTS, PROJECTED_GROUPS, describe_hybrid, hybrid, mtp_mappings
from .qwen2_moe import gated_experts, gated_routing
from .qwen3_moe import moe_layers


def architecture(config: HfConfig) -> Architecture:
    return describe_moe(config, _moe_layers(config))


def describe_moe(config: HfConfig, moe: tuple[int, ...]) -> Architecture:
    """Return the architecture of a hybrid whose layers `moe` have experts."""
    transformer, rule = gated_routing(config, moe) if moe else ({}, None)
    return describe_hybrid(config, transformer, routing=rule)


def _moe_layers(config: HfConfig) -> tuple[int, ...]:
    return moe_layers(config) if config["num_experts"] else ()


def mappings(config: HfConfig) -> list[ParamMapping]:
    moe = _moe_layers(config)
    return hybrid(config, PROJECTED_GROUPS, fp32=False) + mlp(dense_layers(config, moe)) + gated_experts(moe)


FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    models="Qwen3-Next-80B-A3B",
    architecture=architecture,
    mappings=mappings,
    mtp_mappings=partial(mtp_mappings, mappings),
    defaults=DEFAULTS
    | {
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
    },
)
