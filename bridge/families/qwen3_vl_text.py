"""Qwen3-VL, dense, text: Qwen3's decoder beside a vision tower."""

from dataclasses import replace

from ..mapping.param_mapping import Architecture, Family, HfConfig
from . import qwen3
from .vlm_text import add_language_model_prefix, mrope_text_config


def architecture(config: HfConfig) -> Architecture:
    # transformers has no windows in this model and ignores their settings.
    return replace(qwen3.architecture(config | {"use_sliding_window": False}), passthrough=r"model\.visual\.")


FAMILY = Family(
    name="qwen3_vl_text",
    architectures=("Qwen3VLForConditionalGeneration",),
    models="Qwen3-VL (dense), text",
    architecture=architecture,
    mappings=qwen3.mappings,
    text_config=mrope_text_config,
    vlm_names=(add_language_model_prefix,),
    limits=("images and videos: the vision tower passes through unchanged",),
    defaults=qwen3.FAMILY.defaults | {"max_position_embeddings": 128000, "rope_theta": 500000.0},
)
