"""Qwen3.5-MoE: Qwen3.5's layers with experts and a shared expert; checkpoints on the hub stack the experts."""

from functools import partial

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import FUSED_GATE_UP, ROW, Family, ParamMapping
from . import qwen3_5_text, qwen3_vl_text
from .decoder import check_supported, layer_mapping
from .gated_delta_hybrid import DEFAULTS, PROJECTED, hybrid, mtp_mappings
from .qwen2_moe import gated_experts
from .qwen3_next import describe_moe
from .vlm_text import add_language_model_prefix, mrope_text_config

STACKED = [
    layer_mapping("mlp.experts.gate_up_proj", "mlp.experts.linear_fc1.weight", FUSED_GATE_UP, stacked=True),
    layer_mapping("mlp.experts.down_proj", "mlp.experts.linear_fc2.weight", ROW, stacked=True),
]


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"norm_topk_prob": (True,)})
    # No layer is dense.
    config = config | {"intermediate_size": config["moe_intermediate_size"], "norm_topk_prob": True}
    decoder = describe_moe(config, tuple(range(config["num_hidden_layers"])))
    return qwen3_5_text.beside_tower(decoder, config)


def mappings(config: HfConfig) -> list[ParamMapping]:
    moe = gated_experts(tuple(range(config["num_hidden_layers"])))
    return hybrid(config, PROJECTED, fp32=True) + (STACKED + moe if "text_config" in config else moe + STACKED)


FAMILY = Family(
    name="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    models="Qwen3.5 and 3.6 (MoE)",
    architecture=architecture,
    mappings=mappings,
    mtp_mappings=partial(mtp_mappings, mappings),
    text_config=mrope_text_config,
    vision=qwen3_5_text.vision,
    vision_mappings=qwen3_vl_text.vision_mappings,
    vlm_names=(add_language_model_prefix,),
    defaults=DEFAULTS
    | {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
)
