"""Kimi-VL: MoonViT, a tower for images of any size, beside DeepSeek-V3's decoder (https://arxiv.org/abs/2504.07491).

transformers has no class for it: the names and settings are those of the checkpoints and of the code in them.
"""

from dataclasses import replace
from functools import partial

from ..mapping.param_mapping import Architecture, Family, HfConfig, ParamMapping, Vision
from .decoder import check_supported
from .vision_tower import REPLICATED_PAIRED_QKV, TowerTable
from .vlm_text import PROJECTOR, TOWER, TOWER_AND_PROJECTOR, nest_in_language_model, text_config, vision_config

ARCHITECTURE = "KimiVLForConditionalGeneration"
EPS = 1e-5  # all norms in tower and projector; config.json has none
VISION_DEFAULTS: HfConfig = {
    "model_type": "moonvit",
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "merge_kernel_size": (2, 2),
}
LIMITS = (f"{ARCHITECTURE}: videos",)


def with_tower(family: Family) -> Family:
    """Return a family of language models that is also the text model of Kimi-VL."""

    def architecture(config: HfConfig) -> Architecture:
        decoder = family.architecture(config)
        if "text_config" not in config:
            return decoder
        parts = (rf"language_model\.{decoder.passthrough}" if decoder.passthrough else "", TOWER_AND_PROJECTOR)
        return replace(decoder, passthrough="|".join(filter(None, parts)))

    return replace(
        family,
        architectures=(*family.architectures, ARCHITECTURE),
        architecture=architecture,
        text_config=partial(text_config, use_inner_tie=True),
        vision=lambda config: vision(config, family.defaults),
        vision_mappings=vision_mappings,
        vlm_names=(nest_in_language_model,),
        limits=family.limits + LIMITS,
    )


def vision(hf_config: HfConfig, text_defaults: HfConfig) -> Vision:
    """Return the tower of a raw config.json. text_defaults: of the text model's class"""
    config = vision_config(hf_config, VISION_DEFAULTS)
    height, width = config["init_pos_emb_height"], config["init_pos_emb_width"]
    check_supported(config, {"model_type": ("moonvit",), "init_pos_emb_width": (height,)})
    merge_height, merge_width = config["merge_kernel_size"]
    if merge_height != merge_width:
        raise ValueError(f"config.json has merge_kernel_size {config['merge_kernel_size']}: only squares are supported")
    return Vision(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        output_size=(text_defaults | hf_config["text_config"])["hidden_size"],
        patch_size=config["patch_size"],
        temporal_patch_size=1,
        merge_size=merge_height,
        eps=EPS,
        grid_side=width,
        grid_axes=2,
        interpolation="bicubic",
        final_norm=True,
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    tower, projector = TowerTable(vision), TowerTable(vision)
    tower.linear("patch_embed.proj", "patch_embed", bias=True)
    tower.add("patch_embed.pos_emb.weight", "position_embeddings.weight")
    hf, mcore, layers = "encoder.blocks.{layer}.", "layers.{layer}.", tower.layers
    tower.norm(hf + "norm0", mcore + "norm1", layers)
    tower.norm(hf + "norm1", mcore + "norm2", layers)
    tower.linear(hf + "wqkv", mcore + "linear_qkv", REPLICATED_PAIRED_QKV, layers, bias=True)
    tower.linear(hf + "wo", mcore + "linear_proj", layers=layers, bias=True)
    tower.linear(hf + "mlp.fc0", mcore + "linear_fc1", layers=layers, bias=True)
    tower.linear(hf + "mlp.fc1", mcore + "linear_fc2", layers=layers, bias=True)
    tower.norm("encoder.final_layernorm", "final_norm")
    projector.norm("pre_norm", "merger.norm")
    projector.linear("linear_1", "merger.linear_fc1", bias=True)
    projector.linear("linear_2", "merger.linear_fc2", bias=True)
    return tower.under(TOWER) + projector.under(PROJECTOR)
