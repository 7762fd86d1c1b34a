"""Qwen3-ASR as transformers names it (`-hf`): Qwen3's decoder beside an audio tower."""

from dataclasses import replace

from ..mapping.architecture import Architecture, Audio, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from . import qwen3
from .audio_tower import DEFAULTS_2D, audio_config, audio_mappings, audio_with_2d_convolutions
from .vlm_text import PROJECTOR, add_language_model_prefix, text_config

AUDIO_DEFAULTS: HfConfig = DEFAULTS_2D | {
    "encoder_layers": 24,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "d_model": 1024,
}


def architecture(config: HfConfig) -> Architecture:
    return replace(qwen3.architecture(config), passthrough=r"model\.(audio_tower|multi_modal_projector)\.")


def audio(hf_config: HfConfig) -> Audio:
    return audio_with_2d_convolutions(audio_config(hf_config, AUDIO_DEFAULTS), masks="never")


def mappings_of_tower(audio: Audio) -> list[ParamMapping]:
    return audio_mappings(audio, "model.audio_tower.", "model." + PROJECTOR, ("linear_1", "linear_2"))


FAMILY = Family(
    name="qwen3_asr",
    architectures=("Qwen3ASRForConditionalGeneration",),
    models="Qwen3-ASR (0.6B-hf, 1.7B-hf)",
    architecture=architecture,
    mappings=qwen3.mappings,
    text_config=lambda config: {"tie_word_embeddings": True} | text_config(config),
    audio=audio,
    audio_mappings=mappings_of_tower,
    vlm_names=(add_language_model_prefix,),
    defaults=qwen3.FAMILY.defaults,
    limits=("checkpoints with the names of the package qwen-asr: take those in transformers' naming, `-hf`",),
)
