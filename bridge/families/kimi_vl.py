"""Kimi-VL and Kimi-K2.5: MoonViT, a tower for images of any size, beside DeepSeek-V3's decoder.

https://arxiv.org/abs/2504.07491. transformers has no class for Kimi-VL: the names and settings are those of the
checkpoints and of the code in them. Kimi-K2.5's tower (https://huggingface.co/moonshotai/Kimi-K2.5) differs for videos
alone; its settings have the names of the checkpoints' code, or of transformers.
"""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import check_supported
from .vision_tower import REPLICATED_PAIRED_QKV, TowerTable
from .vlm_text import (
    PROJECTOR,
    TOWER,
    TOWER_AND_PROJECTOR,
    nest_in_language_model,
    nested_text_config,
    text_config,
    vision_config,
)

# Kimi-VL's class, and Kimi-K2.5's by the names of its checkpoints and of transformers.
ARCHITECTURES = "KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"
EPS = 1e-5  # all norms of the tower; config.json has none
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
    "hidden_act": "gelu_pytorch_tanh",
}
# Names of the settings in config.json of Kimi-K2.5.
OTHER_NAMES = {f"vt_{name}": name for name in VISION_DEFAULTS} | {
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
}
KIMI_VL = "moonvit"  # model_type of its vision_config
K25_PROJECTOR = "mm_projector."
PASSTHROUGH = rf"{TOWER_AND_PROJECTOR}|{K25_PROJECTOR[:-1]}\."
# Of transformers' class of Kimi-K2.5; Kimi-VL has none. The tower's attention has other matrices there.
MODULES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head", "lm_head"),
)
LIMITS = ("KimiVLForConditionalGeneration and Kimi_K25ForConditionalGeneration: videos",)


def with_tower(family: Family) -> Family:
    """Return a family of language models that is also the text model of Kimi-VL and of Kimi-K2.5."""

    def architecture(config: HfConfig) -> Architecture:
        decoder = family.architecture(config)
        if "text_config" not in config:
            return decoder
        parts = (rf"language_model\.{decoder.passthrough}" if decoder.passthrough else "", PASSTHROUGH)
        module_names = () if _is_kimi_vl(config) else MODULES
        return replace(decoder, passthrough="|".join(filter(None, parts)), module_names=module_names)

    return replace(
        family,
        architectures=(*family.architectures, *ARCHITECTURES),
        architecture=architecture,
        text_config=_text_config,
        vision=lambda config: vision(config, family.defaults),
        vision_mappings=vision_mappings,
        vlm_names=(nest_in_language_model,),
        limits=family.limits + LIMITS,
    )


def _is_kimi_vl(config: HfConfig) -> bool:
    return (config.get("vision_config") or {}).get("model_type") == KIMI_VL


def _text_config(config: HfConfig) -> HfConfig:
    return text_config(config, use_inner_tie=True) if _is_kimi_vl(config) else nested_text_config(config)


def vision(hf_config: HfConfig, text_defaults: HfConfig) -> Vision:
    """Return the tower of a raw config.json. text_defaults: of the text model's class"""
    raw: HfConfig = hf_config["vision_config"]
    settings = {OTHER_NAMES.get(name, name): value for name, value in raw.items()}
    config = vision_config(hf_config | {"vision_config": settings}, VISION_DEFAULTS)
    height, width = config["init_pos_emb_height"], config["init_pos_emb_width"]
    types = KIMI_VL, "kimi_k25", "kimi_k25_vision", ""
    check_supported(
        config, {"model_type": types, "init_pos_emb_width": (height,), "hidden_act": ("gelu_pytorch_tanh",)}
    )
    # Of Kimi-K2.5: how its own code merges patches, and attends within videos.
    check_supported(config, {"merge_type": ("sd2_tpool",), "pos_emb_type": ("divided_fixed",)})
    size = config["hidden_size"]
    widths = {"mm_hidden_size": (size,), "projection_hidden_size": (size,)}
    check_supported(config | hf_config, widths | {"projector_hidden_act": ("gelu",)})
    projector_eps = hf_config.get("projection_layer_norm_eps") or config.get("projector_ln_eps") or EPS
    if projector_eps != EPS:
        raise ValueError(f"config.json has {projector_eps} as the epsilon of the projector's norm: {EPS} is supported")
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
        rope_base=config["rope_base"],
        grid_side=width,
        grid_axes=2,
        interpolation="bicubic",
        final_norm=True,
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    tower, projector, k25_projector = TowerTable(vision), TowerTable(vision), TowerTable(vision)
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
    k25_projector.norm("pre_norm", "merger.norm")
    k25_projector.linear("proj.0", "merger.linear_fc1", bias=True)
    k25_projector.linear("proj.2", "merger.linear_fc2", bias=True)
    return tower.under(TOWER) + projector.under(PROJECTOR) + k25_projector.under(K25_PROJECTOR)
