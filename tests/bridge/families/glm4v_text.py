"""GLM-4.1V: the text model of a vision-language checkpoint."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tensors, Tiny
from tests.bridge.families.qwen2_5_vl_text import without_tower

VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
    "image_size": 24,
}
MROPE = ROPE | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}


def config(**changes):
    from transformers import Glm4vConfig

    tied = changes.pop("tie_word_embeddings", False)
    text = SHARED | {"rope_parameters": MROPE} | changes
    return Glm4vConfig(text_config=text, vision_config=VISION, tie_word_embeddings=tied)


def _model(config):
    from transformers import Glm4vForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Glm4vForConditionalGeneration(config)


def tower(config, noise) -> Tensors:
    """Make some tensors of the vision tower."""
    return {
        "model.visual.patch_embed.proj.weight": noise(16, 3, 2, 4, 4),
        "model.visual.downsample.bias": noise(48),
    }


TINY = {
    "": Tiny(config, ("TP2 SP", "PP2"), files=without_tower, extra=tower, model=_model),
    "tied": Tiny(partial(config, tie_word_embeddings=True), ("CP2",), files=without_tower, extra=tower, model=_model),
}
