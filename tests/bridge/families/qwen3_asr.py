"""Qwen3-ASR: the text model of an audio-language checkpoint."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tensors, Tiny

TOWER = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 20, "d_model": 16, "output_dim": 48}


def config(**changes):
    from transformers import Qwen3ASRConfig

    tied = changes.pop("tie_word_embeddings", False)
    text = SHARED | {"model_type": "qwen3", "head_dim": 16, "rope_parameters": ROPE} | changes
    return Qwen3ASRConfig(text_config=text, audio_config=TOWER, tie_word_embeddings=tied)


def _model(config):
    from transformers import Qwen3ASRForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Qwen3ASRForConditionalGeneration(config)


def without_tower(tensors: Tensors) -> Tensors:
    """Drop the audio tower, which has no gradients: `tower` adds some of it."""
    return {name: t for name, t in tensors.items() if "audio_tower" not in name and "projector" not in name}


def tower(config, noise) -> Tensors:
    """Make some tensors of the audio tower."""
    return {"model.audio_tower.ln_post.weight": noise(16), "model.multi_modal_projector.linear_1.bias": noise(16)}


TINY = {
    "": Tiny(config, ("TP2 SP",), files=without_tower, extra=tower, model=_model),
    "tied": Tiny(partial(config, tie_word_embeddings=True), ("PP2",), files=without_tower, extra=tower, model=_model),
}
