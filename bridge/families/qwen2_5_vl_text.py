"""Qwen2-VL and Qwen2.5-VL, text: Qwen2.5's decoder beside a vision tower.

config.json on the hub is flat; transformers 5 writes a text_config. Tensors have the names of Qwen2.5 in both.
"""

from dataclasses import replace

from ..mapping.param_mapping import Architecture, Family, HfConfig
from . import qwen2
from .vlm_text import add_language_model_prefix, mrope_text_config


def architecture(config: HfConfig) -> Architecture:
    return replace(
        qwen2.architecture(config),
        passthrough=r"(model\.)?visual\.",
        module_names=((r"^model\.(?!language_model\.)", "model.language_model."),),
    )


def text_config(config: HfConfig) -> HfConfig:
    """Return the text model's part; the output layer is tied if the outer or the inner config says so."""
    inner = config.get("text_config", {})
    is_tied = bool(config.get("tie_word_embeddings") or inner.get("tie_word_embeddings"))
    return {**mrope_text_config(config), "tie_word_embeddings": is_tied}


FAMILY = Family(
    name="qwen2_5_vl_text",
    architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    models="Qwen2-VL, Qwen2.5-VL, QVQ, text",
    architecture=architecture,
    mappings=qwen2.mappings,
    text_config=text_config,
    vlm_names=(str, add_language_model_prefix),
    limits=("images and videos: the vision tower passes through unchanged",),
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
