"""GLM-4.1V: GLM-4's decoder with positions on three axes, beside a tower whose merger follows a convolution."""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import glm4
from .decoder import DEFAULTS, check_supported
from .qwen2_5_vl_text import text_config
from .vision_tower import TOWER_NAMES, common_settings, tower_mappings, with_rope_axes
from .vlm_text import add_language_model_prefix, vision_config

VISION_DEFAULTS: HfConfig = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}


def architecture(config: HfConfig) -> Architecture:
    # transformers' class ignores head_dim and attention_bias.
    check_supported(config, {"head_dim": (config["hidden_size"] // config["num_attention_heads"],)})
    return beside_tower(glm4.architecture(config | {"attention_bias": True}), config)


def beside_tower(decoder: Architecture, config: HfConfig) -> Architecture:
    """Return the architecture with the positions, names and passthrough tensors of a model that has a tower."""
    passthrough = rf"(model\.)?visual\.|model\.(language_model\.)?layers\.{config['num_hidden_layers']}\."
    decoder = replace(decoder, passthrough=passthrough, module_names=TOWER_NAMES)
    # transformers' default sections fit a rope of 32 planes only.
    sections = [8, 12, 12] if decoder.ropes[0].dim == 64 else None
    return with_rope_axes(decoder, config, interleaved=False, sections=sections)


def mappings(config: HfConfig) -> list[ParamMapping]:
    return glm4.mappings(config | {"attention_bias": True})


def vision(hf_config: HfConfig) -> Vision:
    config = vision_config(hf_config, VISION_DEFAULTS)
    return Vision(
        **common_settings(config),
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["out_hidden_size"],
        output_size=config["out_hidden_size"],
        normalization="RMSNorm",
        eps=config["rms_norm_eps"],
        gated=True,
        qkv_bias=config["attention_bias"],
        layer_bias=False,
        patch_norm=True,
        grid_side=config["image_size"] // config["patch_size"],
        interpolation="bicubic",
        final_norm=True,
        gated_merger_size=config["intermediate_size"],
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    return tower_mappings(
        vision,
        attention="attn.{}",
        fc1="mlp.{part}_proj",
        fc2="mlp.down_proj",
        merger={"proj": "proj", "norm": "post_projection_norm", "fc1": "{part}_proj", "fc2": "down_proj"},
        position_embeddings="embeddings.position_embedding",
    )


FAMILY = Family(
    name="glm4v_text",
    architectures=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
    models="GLM-4.1V-9B, GLM-4.6V-Flash",
    architecture=architecture,
    mappings=mappings,
    text_config=text_config,
    vision=vision,
    vision_mappings=vision_mappings,
    vlm_names=(add_language_model_prefix,),
    limits=("head_dim other than hidden_size / num_attention_heads",),
    defaults=DEFAULTS
    | {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
)
