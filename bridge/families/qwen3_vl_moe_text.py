"""Qwen3-VL-MoE: Qwen3-MoE's decoder beside Qwen3-VL's vision tower; the files stack and transpose the experts."""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import FUSED_GATE_UP, REPLICATED, ROW, Family, ParamMapping
from . import qwen3_moe, qwen3_vl_text
from .decoder import ATTENTION, ENDS, QK_NORMS, attention_biases, dense_layers, layer_mapping, mlp
from .vision_tower import TOWER_NAMES, with_rope_axes
from .vlm_text import add_language_model_prefix, mrope_text_config


def architecture(config: HfConfig) -> Architecture:
    # transformers always normalizes the weights of a token's experts, and has no windows.
    fixed = {"norm_topk_prob": True, "use_sliding_window": False}
    config = {"num_experts": config.get("num_local_experts", 60)} | config | fixed  # transformers 5 writes the first
    decoder = replace(qwen3_moe.architecture(config), passthrough=r"(model\.)?visual\.", module_names=TOWER_NAMES)
    return with_rope_axes(decoder, config, interleaved=True, sections=[24, 20, 20])


def mappings(config: HfConfig) -> list[ParamMapping]:
    moe = qwen3_moe.moe_layers(config)
    fc1, fc2 = "mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"
    return [
        *ENDS,
        *ATTENTION,
        *attention_biases(config),
        *QK_NORMS,
        *mlp(dense_layers(config, moe)),
        layer_mapping("mlp.gate.weight", "mlp.router.weight", REPLICATED, moe),
        layer_mapping("mlp.experts.gate_up_proj", fc1, FUSED_GATE_UP, moe, stacked=True, transposed=True),
        layer_mapping("mlp.experts.down_proj", fc2, ROW, moe, stacked=True, transposed=True),
    ]


FAMILY = Family(
    name="qwen3_vl_moe_text",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    models="Qwen3-VL (MoE: 30B-A3B, 235B-A22B)",
    architecture=architecture,
    mappings=mappings,
    text_config=mrope_text_config,
    vision=qwen3_vl_text.vision,
    vision_mappings=qwen3_vl_text.vision_mappings,
    vlm_names=(add_language_model_prefix,),
    defaults=qwen3_moe.FAMILY.defaults
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
)
