"""Gemma 4 text: layers with full attention have fewer, wider heads whose values are their keys; or have values.

Alone, or within a checkpoint whose model also sees.
"""

from dataclasses import replace
from functools import partial

from tests.bridge.families import DENSE, RECOMPUTE, SHARED, Tensors, Tiny
from tests.bridge.families.faults import Fault, changed, swapped

ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}


SETTINGS = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 2.5,
    "sliding_window": 13,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": ROPES,
}


def config(**changes):
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(**SHARED | SETTINGS | {"hidden_size_per_layer_input": 0} | changes)


def published(text):
    """config.json with the keys of the hub's."""
    kept = {key: value for key, value in text.items() if key != "per_layer_config"}
    return kept | {"global_head_dim": 24, "num_global_key_value_heads": 2}


def nested(text):
    """config.json of a vision-language model."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {key: value for key, value in published(text).items() if key != "architectures"},
        "vision_config": {"num_hidden_layers": 1},
    }


def within(tensors: Tensors) -> Tensors:
    """The names on the hub, within a vision-language model."""
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}


def unseen(config, noise) -> Tensors:
    """Some of the towers, which are carried along."""
    return {"model.vision_tower.std_bias": noise(16), "model.embed_vision.embedding_projection.weight": noise(48, 16)}


def full_rope() -> Fault:
    """All planes turn in layers with full attention."""

    def change(about):
        full, sliding = about.ropes
        return replace(about, ropes=(replace(full, scaling=None), sliding))

    return Fault(architecture=change)


FAULTS = {
    "full rope": full_rope(),
    "scalars of other layers": swapped("0.layer_scalar", "1.layer_scalar"),
    "norms behind the branches": swapped("post_attention_layernorm", "post_feedforward_layernorm"),
    "no cap on logits": changed(logits_cap=None),
    "values as they are": changed(value_norm=False),
}
MEANS = {r"layer_scalar": 1.0}
TINY = {
    "": Tiny(config, (*DENSE, *RECOMPUTE), means=MEANS, faults=FAULTS),
    "values": Tiny(partial(config, attention_k_eq_v=False), ("TP2 SP",), means=MEANS, faults=FAULTS),
    "within": Tiny(config, ("PP2",), means=MEANS, files=within, raw=nested, extra=unseen),
}
