"""LLaVA-OneVision: SigLIP's tower beside Qwen2's decoder (https://arxiv.org/abs/2408.03326).

An image is resized to one square, and cut into tiles besides, whose features are put together.
"""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Projector, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import qwen2, siglip
from .decoder import check_supported
from .vision_tower import ACTIVATIONS, TowerTable
from .vlm_text import (
    NESTED_MODULES,
    PROJECTOR,
    TOWER_AND_PROJECTOR,
    add_language_model_prefix,
    nest_in_language_model,
    text_config,
)

ARCHITECTURE = "LlavaOnevisionForConditionalGeneration"
NEWLINE = "image_newline"
ASPECT_RATIO = "anyres_max_"  # in vision_aspect_ratio, before the number of tiles to which features are reduced
MODULES = ((rf"^{NEWLINE}$", "model." + NEWLINE),)


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"model_type": ("qwen2",)})
    return replace(
        qwen2.architecture(config),
        passthrough=rf"{TOWER_AND_PROJECTOR}|(model\.)?{NEWLINE}$",
        module_names=siglip.MODULES + NESTED_MODULES + MODULES,
    )


def _text_config(config: HfConfig) -> HfConfig:
    """Return the text model's part of a config.json. The inner or the outer tie_word_embeddings ties the output."""
    text = text_config(config, use_inner_tie=True)
    return text | {"tie_word_embeddings": any(part.get("tie_word_embeddings") for part in (text, config))}


def vision(hf_config: HfConfig) -> Vision:
    """Return the tower of a raw config.json."""
    check_supported(
        hf_config,
        {
            "vision_feature_layer": (-1,),
            "vision_feature_select_strategy": ("full",),
            "projector_hidden_act": ACTIVATIONS,
        },
    )
    aspect_ratio = hf_config.get("vision_aspect_ratio") or ASPECT_RATIO + "9"
    most_tiles = aspect_ratio.removeprefix(ASPECT_RATIO)
    if not aspect_ratio.startswith(ASPECT_RATIO) or not most_tiles.isdecimal() or not int(most_tiles):
        raise ValueError(f"config.json has vision_aspect_ratio {aspect_ratio!r}: only anyres_max_N is supported")
    return Vision(
        **siglip.tower_settings(hf_config),
        output_size=(qwen2.FAMILY.defaults | hf_config["text_config"])["hidden_size"],
        merge_size=1,
        most_tiles=int(most_tiles),
        projector=Projector(
            eps=None,
            bias=hf_config.get("multimodal_projector_bias", True),
            activation=hf_config.get("projector_hidden_act", "gelu"),
            reduces_squares=False,
        ),
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    assert vision.projector is not None
    projector, newline = TowerTable(vision), TowerTable(vision)
    projector.linear("linear_1", "merger.linear_fc1", bias=vision.projector.bias)
    projector.linear("linear_2", "merger.linear_fc2", bias=vision.projector.bias)
    newline.add(NEWLINE, "merger.newline")
    others = projector.under(PROJECTOR, "model." + PROJECTOR) + newline.under("", "model.")
    return siglip.tower_mappings(vision) + others


FAMILY = Family(
    name="llava_onevision",
    architectures=(ARCHITECTURE,),
    models="LLaVA-OneVision (0.5B, 7B and 72B)",
    architecture=architecture,
    mappings=qwen2.mappings,
    text_config=_text_config,
    vision=vision,
    vision_mappings=vision_mappings,
    vlm_names=(nest_in_language_model, add_language_model_prefix),
    defaults=qwen2.FAMILY.defaults,
    limits=("towers other than SigLIP's, text models other than Qwen2, other layers' features, heads",),
)
