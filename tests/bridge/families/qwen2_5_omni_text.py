"""Qwen2.5-Omni: the thinker's text model, whose settings are nested and whose tensors have a prefix; or alone."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tensors, Tiny
from tests.bridge.families.qwen3_omni_moe_text import AUDIO, whole, without_towers

VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4
}  # fmt: skip


def config(**changes):
    from transformers import Qwen2_5OmniThinkerConfig

    text = SHARED | {"rope_parameters": {"mrope_section": [2, 2, 2], **ROPE}} | changes
    return Qwen2_5OmniThinkerConfig(text_config=text, vision_config=VISION, audio_config=AUDIO)


def _model(config):
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Qwen2_5OmniThinkerForConditionalGeneration(config)


def carried(config, noise) -> Tensors:
    """Some tensors of the towers and of the models that speak."""
    return {
        "thinker.visual.blocks.0.attn.q.bias": noise(16),
        "thinker.audio_tower.audio_bos_eos_token.weight": noise(2, 48),
        "talker.model.embed_tokens.weight": noise(9, 24),
        "token2wav.code2wav_bigvgan_model.conv_pre.weight": noise(3, 5, 7),
    }


WHOLE = {"files": partial(without_towers, prefix="thinker."), "raw": whole, "extra": carried, "model": _model}
WINDOWS = {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2}
TINY = {
    "": Tiny(config, ("TP2 SP", "PP2", "CP2"), **WHOLE),
    "alone, windows": Tiny(partial(config, **WINDOWS), (), files=without_towers, model=_model),
}
