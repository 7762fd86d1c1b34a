"""GPT-OSS: attention sinks and alternating windows, biases everywhere, experts with a clamped SwiGLU."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import COLUMN, REPLICATED, ROW, Architecture, Family, Kind, Routing, Row, Span
from .decoder import ATTENTION, ENDS, HF_LAYER, LAYER, attention_biases, describe_decoder, windowed, with_defaults

# transformers' GptOssConfig
DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _alternating(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """For each rank its gate, then its up, which alternate in one tensor."""
    size = length // ranks
    return [Span(0, r * size + first, (r + 1) * size, step=2) for r in range(ranks) for first in (0, 1)]


ALTERNATING = Kind(0, _alternating)


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = config | {"rope_scaling": YARN}
    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(settings["num_hidden_layers"])]
    architecture = describe_decoder(
        config,
        settings,
        add_qkv_bias=settings["attention_bias"],
        num_moe_experts=settings["num_local_experts"],
        moe_router_topk=settings["num_experts_per_tok"],
        moe_router_score_function="softmax",
        moe_router_pre_softmax=True,
        moe_ffn_hidden_size=settings["intermediate_size"],
        activation_func="quick_gelu",
        activation_func_clamp_value=settings["swiglu_limit"],
        glu_linear_offset=1.0,
    )
    return replace(
        architecture,
        layers=windowed(config | {"sliding_window": settings["sliding_window"]}, len(kinds), default=kinds),
        output_bias=settings["attention_bias"],
        sinks=True,
        expert_bias=True,
        routing=Routing(logit_bias=True),
    )


def rows(config: dict[str, Any]) -> list[Row]:
    hf, mcore = HF_LAYER + "mlp.experts.", LAYER + "mlp.experts."
    return [
        *ENDS,
        *ATTENTION,
        *attention_biases(with_defaults(config, DEFAULTS)),
        Row(HF_LAYER + "self_attn.sinks", LAYER + "self_attention.core_attention.softmax_offset", COLUMN),
        Row(HF_LAYER + "mlp.router.weight", LAYER + "mlp.router.weight", REPLICATED),
        Row(HF_LAYER + "mlp.router.bias", LAYER + "mlp.router.bias", REPLICATED),
        Row(hf + "gate_up_proj", mcore + "linear_fc1.weight", ALTERNATING, stacked=True, transposed=True),
        Row(hf + "gate_up_proj_bias", mcore + "linear_fc1.bias", ALTERNATING, stacked=True),
        Row(hf + "down_proj", mcore + "linear_fc2.weight", ROW, stacked=True, transposed=True),
        Row(hf + "down_proj_bias", mcore + "linear_fc2.bias", REPLICATED, stacked=True),
    ]


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    models="gpt-oss-20b, gpt-oss-120b",
    describe=describe,
    rows=rows,
)
