"""Qwen2-VL and Qwen2.5-VL: Qwen2.5's decoder beside a vision tower, which in Qwen2.5-VL attends within windows.

config.json on the hub is flat; transformers 5 writes a text_config. Tensors have the names of Qwen2.5 in both.
"""

from dataclasses import replace
from typing import Any

from ..mapping.architecture import Architecture, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import qwen2
from .vision_tower import TOWER_NAMES, common_settings, tower_mappings, with_rope_axes
from .vlm_text import add_language_model_prefix, mrope_text_config, vision_config

VISION_DEFAULTS: HfConfig = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
QWEN2_VISION_DEFAULTS: HfConfig = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def architecture(config: HfConfig) -> Architecture:
    decoder = replace(
        qwen2.architecture(config),
        passthrough=r"(model\.)?visual\.",
        module_names=(
            (r"^model\.(?!language_model\.|visual\.)", "model.language_model."),
            *TOWER_NAMES,
        ),
    )
    return with_rope_axes(decoder, config, interleaved=False)


def vision(hf_config: HfConfig) -> Vision:
    """Return Qwen2.5-VL's tower, or Qwen2-VL's: with layer norms, without gates and windows."""
    is_first = "Qwen2VLForConditionalGeneration" in (hf_config.get("architectures") or [])
    config = vision_config(hf_config, QWEN2_VISION_DEFAULTS if is_first else VISION_DEFAULTS)
    shared: dict[str, Any] = common_settings(config) | {"patch_bias": False}
    if is_first:
        size = config["embed_dim"]
        ffn = int(size * config["mlp_ratio"])
        return Vision(hidden_size=size, ffn_hidden_size=ffn, output_size=config["hidden_size"], **shared)
    return Vision(
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        output_size=config["out_hidden_size"],
        normalization="RMSNorm",
        gated=True,
        window=config["window_size"],
        full_layers=tuple(config["fullatt_block_indexes"]),
        **shared,
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    return tower_mappings(
        vision,
        attention="attn.{}",
        fc1="mlp.{part}_proj" if vision.gated else "mlp.fc1",
        fc2="mlp.down_proj" if vision.gated else "mlp.fc2",
        merger={"norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"},
    )


def text_config(config: HfConfig) -> HfConfig:
    """Return the text model's part; the output layer is tied if the outer or the inner config says so."""
    inner = config.get("text_config", {})
    is_tied = bool(config.get("tie_word_embeddings") or inner.get("tie_word_embeddings"))
    return {**mrope_text_config(config), "tie_word_embeddings": is_tied}


FAMILY = Family(
    name="qwen2_5_vl_text",
    architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    models="Qwen2-VL, Qwen2.5-VL, QVQ",
    architecture=architecture,
    mappings=qwen2.mappings,
    text_config=text_config,
    vision=vision,
    vision_mappings=vision_mappings,
    vlm_names=(str, add_language_model_prefix),
    defaults=qwen2.FAMILY.defaults
    | {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_window_layers": 80,
    },
)
