"""Qwen2-VL and Qwen2.5-VL: config.json nested as transformers writes it, or flat as on the hub."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tensors, Tiny

MROPE = {"mrope_section": [2, 2, 2], **ROPE}


def config(**changes):
    from transformers import Qwen2_5_VLConfig

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 48}
    vision |= {"patch_size": 4}
    outer = {"tie_word_embeddings": changes.pop("tie_word_embeddings", False)}
    return Qwen2_5_VLConfig(text_config=SHARED | {"rope_parameters": MROPE} | changes, vision_config=vision, **outer)


def qwen2_vl():
    from transformers import Qwen2VLConfig

    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    return Qwen2VLConfig(text_config=SHARED | {"rope_parameters": MROPE}, vision_config=vision)


def _model(config):
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    kinds = {"qwen2_vl": Qwen2VLForConditionalGeneration, "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration}
    return kinds[config.model_type](config)


def without_tower(tensors: Tensors) -> Tensors:
    """Drop the vision tower, which has no gradients: `tower` adds some of it."""
    return {name: tensor for name, tensor in tensors.items() if "visual" not in name}


def with_prefix(tensors: Tensors) -> Tensors:
    """Rename to what transformers 4.52 to 4.57 may save."""
    return {name.replace("model.", "model.language_model.", 1): t for name, t in without_tower(tensors).items()}


def tower(config, noise, prefix: str = "") -> Tensors:
    """Make some tensors of the vision tower."""
    return {
        prefix + "visual.patch_embed.proj.weight": noise(16, 3, 2, 4, 4),
        prefix + "visual.merger.ln_q.weight": noise(16),
    }


def flatten(raw):
    """Return config.json as on the hub: the text model's keys at the top, and `rope_scaling`."""
    inner = raw["text_config"]
    skipped = ("rope_parameters", "model_type", "layer_types")
    text = {key: value for key, value in inner.items() if key not in skipped}
    rope = {"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
    return text | rope | {key: value for key, value in raw.items() if key != "text_config"}


TINY = {
    "": Tiny(config, ("TP2 SP", "PP2"), files=without_tower, extra=tower, model=_model),
    "flat, tied": Tiny(
        partial(config, tie_word_embeddings=True), (), files=without_tower, extra=tower, model=_model, raw=flatten
    ),
    "prefixed, windows": Tiny(
        partial(config, use_sliding_window=True, sliding_window=13, max_window_layers=2),
        ("CP2",),
        files=with_prefix,
        extra=partial(tower, prefix="model."),
        model=_model,
    ),
    "Qwen2-VL": Tiny(qwen2_vl, (), files=without_tower, extra=tower, model=_model),
}
