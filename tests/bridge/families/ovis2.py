"""Ovis2: the text model of a vision-language checkpoint."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tensors, Tiny

TOWER = {
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20, "hidden_size": 16, "image_size": 8,
    "patch_size": 4, "hidden_stride": 2, "vocab_size": 11,
}  # fmt: skip


def config(tied=False, **changes):
    from transformers import Ovis2Config

    text = SHARED | {"model_type": "qwen2", "rope_parameters": ROPE} | changes
    sizes = {name: text[name] for name in ("hidden_size", "vocab_size")}
    return Ovis2Config(text_config=text, vision_config=TOWER, image_token_id=250, tie_word_embeddings=tied, **sizes)


def _model(config):
    from transformers import Ovis2ForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Ovis2ForConditionalGeneration(config)


def without_tower(tensors: Tensors) -> Tensors:
    """Drop the tower, which has no gradients: `tower` adds some of it."""
    return {name: t for name, t in tensors.items() if "vision_tower" not in name and "visual_embeddings" not in name}


def tower(config, noise) -> Tensors:
    """Make some tensors of the tower."""
    return {
        "model.vision_tower.transformer.rms_norm.weight": noise(16),
        "model.vision_tower.head_norm.bias": noise(6),
        "model.visual_embeddings_table.weight": noise(11, 48),
    }


TINY = {
    "": Tiny(config, (), files=without_tower, extra=tower, model=_model),
    "tied": Tiny(partial(config, tied=True), (), files=without_tower, extra=tower, model=_model),
}
