"""Thinker of Qwen3-Omni: Qwen3-MoE's decoder beside Qwen3-VL's vision tower, with DeepStack, and an audio tower.

The talker and code2wav, which speak, are saved unchanged.
"""

from dataclasses import replace

from ..mapping.architecture import Architecture, Audio, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import qwen3_moe, qwen3_vl_text
from .audio_tower import DEFAULTS_2D, audio_config, audio_mappings, audio_with_2d_convolutions
from .thinker import SPEECH, add_thinker_prefix, under_thinker
from .vision_tower import tower_mappings, with_rope_axes
from .vlm_text import mrope_text_config


def architecture(config: HfConfig) -> Architecture:
    # transformers has no windows in this model and ignores their settings.
    decoder = qwen3_moe.architecture(config | {"use_sliding_window": False})
    decoder = replace(decoder, passthrough=rf"(thinker\.)?(visual|audio_tower)\.|{SPEECH}")
    return with_rope_axes(decoder, config, interleaved=True, sections=[24, 20, 20])


def audio(hf_config: HfConfig) -> Audio:
    return audio_with_2d_convolutions(audio_config(hf_config, DEFAULTS_2D), masks="short")


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    mappings = tower_mappings(
        vision,
        attention="attn.{}",
        fc1="mlp.linear_fc1",
        fc2="mlp.linear_fc2",
        merger={"norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"},
        deep_merger="merger_list",
        prefixes=("visual.",),
    )
    return under_thinker(mappings)


def mappings_of_audio(audio: Audio) -> list[ParamMapping]:
    return under_thinker(audio_mappings(audio, "audio_tower.", "audio_tower.", ("proj1", "proj2")))


FAMILY = Family(
    name="qwen3_omni_moe_text",
    architectures=("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    models="Qwen3-Omni (30B-A3B Instruct, Thinking and Captioner): its thinker",
    architecture=architecture,
    mappings=qwen3_moe.mappings,
    text_config=mrope_text_config,
    vision=qwen3_vl_text.vision,
    vision_mappings=vision_mappings,
    audio=audio,
    audio_mappings=mappings_of_audio,
    vlm_names=(add_thinker_prefix, str),
    defaults=qwen3_moe.FAMILY.defaults
    | {
        "vocab_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "norm_topk_prob": True,
    },
    limits=("its talker and code2wav, which speak, are saved unchanged",),
)
