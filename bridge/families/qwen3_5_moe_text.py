"""Qwen3.5-MoE: Qwen3.5's layers with many experts and a shared one; on the hub the experts lie stacked."""

from typing import Any

from ..mapping.param_mapping import FUSED_GATE_UP, ROW, Architecture, Family, Row
from .decoder import HF_LAYER, LAYER, check_known, with_defaults
from .gated_delta_hybrid import DEFAULTS as HYBRID
from .gated_delta_hybrid import PROJECTED, hybrid
from .qwen2_moe import gated_experts
from .qwen3_5_text import seen_as_text
from .qwen3_next import describe_moe
from .vlm_text import inner, spelled

# transformers' Qwen3_5MoeTextConfig
DEFAULTS = {
    **HYBRID,
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}


def describe(config: dict[str, Any]) -> Architecture:
    text = seen_as_text(config)
    check_known(text, {"norm_topk_prob": (True,)})
    settings = with_defaults(text, DEFAULTS) | {"norm_topk_prob": True}
    settings["intermediate_size"] = settings["moe_intermediate_size"]  # no layer is dense
    return describe_moe(text, settings, tuple(range(settings["num_hidden_layers"])))


def rows(config: dict[str, Any]) -> list[Row]:
    text = seen_as_text(config)
    settings = with_defaults(text, DEFAULTS)
    moe = gated_experts(tuple(range(settings["num_hidden_layers"])))
    hf, mcore = HF_LAYER + "mlp.experts.", LAYER + "mlp.experts."
    stacked = [
        Row(hf + "gate_up_proj", mcore + "linear_fc1.weight", FUSED_GATE_UP, stacked=True),
        Row(hf + "down_proj", mcore + "linear_fc2.weight", ROW, stacked=True),
    ]
    experts = stacked + moe if "text_config" in config else moe + stacked
    return spelled(config, hybrid(text, settings, PROJECTED, fp32=True) + experts, inner)


FAMILY = Family(
    name="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    models="Qwen3.5 (MoE), text",
    describe=describe,
    rows=rows,
    limits=("images and videos: the vision tower is carried along unchanged",),
)
