"""Gemma 3 text: windows and their own rope in every other layer, a scaled one in the rest; norms that add 1.

Alone, or within a checkpoint whose model also sees.
"""

from tests.bridge.families import SHARED, Tensors, Tiny
from tests.bridge.families.faults import layers_changed, swapped


def config(**changes):
    from transformers import Gemma3TextConfig

    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    settings = {
        "head_dim": 16,
        "query_pre_attn_scalar": 11,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": ropes,
    }
    return Gemma3TextConfig(**SHARED | settings | changes)


def whole(tensors: Tensors) -> Tensors:
    """The names on the hub, within a vision-language model."""
    return {"language_model." + name: tensor for name, tensor in tensors.items()}


def within(tensors: Tensors) -> Tensors:
    """The names that transformers 5 writes for it."""
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}


def unseen(config, noise) -> Tensors:
    """Some of the vision tower, which is carried along."""
    return {
        "vision_tower.vision_model.post_layernorm.bias": noise(16),
        "multi_modal_projector.mm_input_projection_weight": noise(16, config.hidden_size),
    }


def nested(text):
    """config.json of a vision-language model."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"num_hidden_layers": 1},
    }


FAULTS = {
    "rope of windows": layers_changed(rope=0),
    "norms behind the branches": swapped("post_attention_layernorm", "post_feedforward_layernorm"),
}
MEANS = {r"norm\.weight$": 0.0}
TINY = {
    "": Tiny(config, means=MEANS, faults=FAULTS),
    "within": Tiny(config, ("PP2",), means=MEANS, files=whole, raw=nested, extra=unseen),
    "within, renamed": Tiny(config, (), means=MEANS, files=within, raw=nested),
}
