"""Qwen3-VL, dense: Qwen3's decoder beside a vision tower, whose features also enter the first layers (DeepStack)."""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import qwen3
from .vision_tower import TOWER_NAMES, common_settings, tower_mappings, with_rope_axes
from .vlm_text import add_language_model_prefix, mrope_text_config, vision_config

VISION_DEFAULTS: HfConfig = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def architecture(config: HfConfig) -> Architecture:
    # transformers has no windows in this model and ignores their settings.
    decoder = replace(
        qwen3.architecture(config | {"use_sliding_window": False}),
        passthrough=r"(model\.)?visual\.",
        module_names=TOWER_NAMES,
    )
    return with_rope_axes(decoder, config, interleaved=True, sections=[24, 20, 20])


def vision(hf_config: HfConfig) -> Vision:
    config = vision_config(hf_config, VISION_DEFAULTS)
    return Vision(
        **common_settings(config),
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        output_size=config["out_hidden_size"],
        grid_side=int(config["num_position_embeddings"] ** 0.5),
        deep_layers=tuple(config["deepstack_visual_indexes"]),
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    return tower_mappings(
        vision,
        attention="attn.{}",
        fc1="mlp.linear_fc1",
        fc2="mlp.linear_fc2",
        merger={"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"},
        deep_merger="deepstack_merger_list",
    )


FAMILY = Family(
    name="qwen3_vl_text",
    architectures=("Qwen3VLForConditionalGeneration",),
    models="Qwen3-VL (dense)",
    architecture=architecture,
    mappings=qwen3.mappings,
    text_config=mrope_text_config,
    vision=vision,
    vision_mappings=vision_mappings,
    vlm_names=(add_language_model_prefix,),
    defaults=qwen3.FAMILY.defaults | {"max_position_embeddings": 128000, "rope_theta": 500000.0},
)
