"""Qwen3-VL, dense: the text model of a vision-language checkpoint."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tensors, Tiny
from tests.bridge.families.qwen2_5_vl_text import without_tower

VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 36,
}
TEXT = {"head_dim": 16, "rope_parameters": {"mrope_section": [4, 2, 2], "mrope_interleaved": True, **ROPE}}


def config(**changes):
    from transformers import Qwen3VLConfig

    tied = changes.pop("tie_word_embeddings", False)
    return Qwen3VLConfig(text_config=SHARED | TEXT | changes, vision_config=VISION, tie_word_embeddings=tied)


def _model(config):
    from transformers import Qwen3VLForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Qwen3VLForConditionalGeneration(config)


def tower(config, noise) -> Tensors:
    """Make some tensors of the vision tower."""
    return {
        "model.visual.pos_embed.weight": noise(36, 16),
        "model.visual.deepstack_merger_list.0.norm.bias": noise(64),
    }


TINY = {
    "": Tiny(config, ("TP2 SP", "CP2"), files=without_tower, extra=tower, model=_model),
    "tied, biases": Tiny(
        partial(config, tie_word_embeddings=True, attention_bias=True),
        ("PP2",),
        files=without_tower,
        extra=tower,
        model=_model,
    ),
}
