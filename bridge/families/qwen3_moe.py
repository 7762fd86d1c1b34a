"""Qwen3-MoE: Qwen3's attention, and in most layers experts behind a softmax router."""

from typing import Any

from ..rows import Architecture, Family, Row
from .decoder import ATTENTION, ENDS, QK_NORMS, describe_decoder, experts, mlp, refuse_sliding_window, with_defaults
from .qwen3 import refuse_attention_bias

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
    refuse_attention_bias(config)
    refuse_sliding_window(config, settings["num_hidden_layers"], first=0)
    if settings["norm_topk_prob"] and settings["num_experts_per_tok"] == 1:
        raise ValueError(
            "config.json has norm_topk_prob true with num_experts_per_tok 1: the only expert's weight is then always "
            "1, and the router could not learn. Set norm_topk_prob to false"
        )
    moe = _moe_layers(config)
    return describe_decoder(
        config,
        settings,
        qk_layernorm=True,
        num_moe_experts=_experts(config),
        moe_router_topk=settings["num_experts_per_tok"],
        moe_ffn_hidden_size=settings["moe_intermediate_size"],
        moe_layer_freq=[int(layer in moe) for layer in range(settings["num_hidden_layers"])],
        moe_router_score_function="softmax",
        # Softmax over the chosen experts equals softmax over all, divided by the sum of the chosen: norm_topk_prob.
        moe_router_pre_softmax=not settings["norm_topk_prob"],
    )


def _experts(config: dict[str, Any]) -> int:
    return config.get("num_experts", config.get("num_local_experts", 128))  # transformers 5 writes the second


def _moe_layers(config: dict[str, Any]) -> tuple[int, ...]:
    settings = with_defaults(config, DEFAULTS)
    step, dense = settings["decoder_sparse_step"], settings["mlp_only_layers"]
    return tuple(i for i in range(settings["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def rows(config: dict[str, Any]) -> list[Row]:
    moe = _moe_layers(config)
    dense = tuple(i for i in range(with_defaults(config, DEFAULTS)["num_hidden_layers"]) if i not in moe)
    return ENDS + ATTENTION + QK_NORMS + mlp(dense) + experts(moe)


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    models="Qwen3 (MoE: 30B-A3B, 235B-A22B, Coder)",
    describe=describe,
    rows=rows,
    limits=(
        "attention_bias",
        "sliding windows (use_sliding_window)",
        "norm_topk_prob with one expert per token",
        "rope scaling other than linear and llama3 (YaRN)",
    ),
)
