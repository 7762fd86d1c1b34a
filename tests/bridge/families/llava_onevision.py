"""LLaVA-OneVision: the text model of a vision-language checkpoint, by the names in files."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tensors, Tiny

TOWER = {
    "model_type": "siglip_vision_model", "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20,
    "hidden_size": 16, "image_size": 8, "patch_size": 4, "vision_use_head": False,
}  # fmt: skip


def config(**changes):
    from transformers import LlavaOnevisionConfig

    text = SHARED | {"model_type": "qwen2", "rope_parameters": ROPE} | changes
    return LlavaOnevisionConfig(text_config=text, vision_config=TOWER, image_token_index=250)


def _model(config):
    from transformers import LlavaOnevisionForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return LlavaOnevisionForConditionalGeneration(config)


def without_tower(tensors: Tensors) -> Tensors:
    """Drop the tower, which has no gradients: `tower` adds some of it."""
    return {
        name: t for name, t in tensors.items() if not any(part in name for part in ("vision", "projector", "newline"))
    }


def tower(config, noise) -> Tensors:
    """Make some tensors of the tower."""
    return {
        "vision_tower.vision_model.post_layernorm.weight": noise(16),
        "multi_modal_projector.linear_1.bias": noise(16),
        "image_newline": noise(48),
    }


TINY = {
    "": Tiny(config, (), files=without_tower, extra=tower, model=_model),
    "tied": Tiny(partial(config, tie_word_embeddings=True), (), files=without_tower, extra=tower, model=_model),
}
