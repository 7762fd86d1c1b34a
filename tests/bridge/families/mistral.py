"""Mistral: a window shorter than the documents in every layer; heads whose size is a setting of its own.

Alone, or within a checkpoint whose model also sees.
"""

from tests.bridge.families import ROPE, SHARED, Tensors, Tiny
from tests.bridge.families.gemma3_text import whole, within


def config(**changes):
    from transformers import MistralConfig

    return MistralConfig(**SHARED | {"rope_parameters": ROPE, "head_dim": 16, "sliding_window": 13} | changes)


def unseen(config, noise) -> Tensors:
    """Some of the vision tower, which is carried along."""
    return {
        "vision_tower.ln_pre.weight": noise(16),
        "multi_modal_projector.linear_1.weight": noise(config.hidden_size, 16),
    }


def nested(text):
    """config.json of a vision-language model, as the hub has Mistral Small 3.1."""
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"num_hidden_layers": 1},
    }


def nested_tied(text):
    """The same with tie_word_embeddings of the whole model, which the text model's own does not change."""
    config = nested(text)
    config["text_config"]["tie_word_embeddings"] = False
    return config | {"tie_word_embeddings": True}


def tied(**changes):
    return config(tie_word_embeddings=True, **changes)


TINY = {
    "": Tiny(config),
    "within": Tiny(config, (), files=whole, raw=nested, extra=unseen),
    "within, renamed": Tiny(tied, (), files=within, raw=nested_tied),
}
