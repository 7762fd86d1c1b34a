"""Mixtral: Mistral's attention, and in every layer experts behind a softmax router."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, describe_decoder, with_defaults
from .softmax_moe import block_sparse_moe, softmax_routing

# transformers' MixtralConfig
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    refuse_jitter(config)
    routing, rule = softmax_routing(settings["num_local_experts"], settings["num_experts_per_tok"], normalize=True)
    architecture = describe_decoder(config, settings, moe_ffn_hidden_size=settings["intermediate_size"], **routing)
    return replace(
        architecture,
        layers=tuple(replace(layer, window=config.get("sliding_window")) for layer in architecture.layers),
        routing=rule,
    )


def refuse_jitter(config: dict[str, Any]) -> None:
    if config.get("router_jitter_noise"):
        raise ValueError(
            f"config.json has router_jitter_noise {config['router_jitter_noise']}: noise on what experts are given in "
            "training is not supported. Set it to 0.0"
        )


def rows(config: dict[str, Any]) -> list[Row]:
    return ENDS + ATTENTION + block_sparse_moe()


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    models="Mixtral 8x7B, 8x22B",
    describe=describe,
    rows=rows,
    limits=("router_jitter_noise",),
)
