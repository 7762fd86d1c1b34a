"""Thinker of Qwen2.5-Omni: Qwen2.5's decoder beside Qwen2.5-VL's vision tower and Whisper's audio tower.

The talker and token2wav, which speak, are saved unchanged.
"""

from dataclasses import replace

from ..mapping.architecture import Architecture, Audio, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import qwen2, qwen2_5_vl_text
from .audio_tower import DEFAULTS_1D, audio_config, audio_mappings, audio_with_1d_convolutions
from .thinker import SPEECH, add_thinker_prefix, under_thinker
from .vision_tower import tower_mappings, with_rope_axes
from .vlm_text import mrope_text_config


def architecture(config: HfConfig) -> Architecture:
    decoder = replace(qwen2.architecture(config), passthrough=rf"(thinker\.)?(visual|audio_tower)\.|{SPEECH}")
    return with_rope_axes(decoder, config, interleaved=False, sections=[16, 24, 24])


def audio(hf_config: HfConfig) -> Audio:
    return audio_with_1d_convolutions(audio_config(hf_config, DEFAULTS_1D))


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    mappings = tower_mappings(
        vision,
        attention="attn.{}",
        fc1="mlp.{part}_proj",
        fc2="mlp.down_proj",
        merger={"norm": "ln_q", "fc1": "mlp.0", "fc2": "mlp.2"},
        has_fused_qkv=False,
        prefixes=("visual.",),
    )
    return under_thinker(mappings)


def mappings_of_audio(audio: Audio) -> list[ParamMapping]:
    return under_thinker(audio_mappings(audio, "audio_tower.", "audio_tower.", ("proj",)))


FAMILY = Family(
    name="qwen2_5_omni_text",
    architectures=(
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen2_5OmniModel",  # on the hub
    ),
    models="Qwen2.5-Omni (3B, 7B): its thinker",
    architecture=architecture,
    mappings=qwen2.mappings,
    text_config=mrope_text_config,
    vision=qwen2_5_vl_text.vision,
    vision_mappings=vision_mappings,
    audio=audio,
    audio_mappings=mappings_of_audio,
    vlm_names=(add_thinker_prefix, str),
    defaults=qwen2.FAMILY.defaults
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "max_window_layers": 28,
    },
    limits=("its talker and token2wav, which speak, are saved unchanged",),
)
