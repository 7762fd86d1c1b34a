"""Gemma 4 text: layers with full attention have fewer, wider heads whose values are their keys; or have values.

Alone, or within a checkpoint whose model also sees. Or with experts beside each layer's dense MLP, or with vectors of
tokens for each layer.
"""

from dataclasses import replace
from functools import partial

from tests.bridge.families import DENSE, MOE, RECOMPUTE, SHARED, VOCAB, Tensors, Tiny
from tests.bridge.families.faults import Fault, changed, rolled, swapped, zeroed

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


def unread(config, noise) -> Tensors:
    """Keys of the layers that share those of others, which the hub's files have."""
    names = ("k_proj", 16), ("v_proj", 16)
    tensors = {f"model.language_model.layers.4.self_attn.{name}.weight": noise(rows, 48) for name, rows in names}
    return tensors | {"model.language_model.layers.5.self_attn.k_norm.weight": noise(24)}


def keys_of_another_layer() -> Fault:
    """The layer with windows attends to the keys of the first such layer, and not of the last."""

    def change(about):
        layers = [replace(layer, kv_source=0) if layer.kv_source == 2 else layer for layer in about.layers]
        return replace(about, layers=(replace(layers[0], gives_keys=True), *layers[1:]))

    return Fault(architecture=change)


def full_rope() -> Fault:
    """All planes turn in layers with full attention."""

    def change(about):
        full, sliding = about.ropes
        return replace(about, ropes=(replace(full, scaling=None), sliding))

    return Fault(architecture=change)


FAULTS = {
    "full rope": full_rope(),
    "scalars of other layers": swapped("0.layer_scalar", "1.layer_scalar"),
    "norms behind the branches": swapped("post_attention_layernorm.", "post_feedforward_layernorm."),
    "no cap on logits": changed(logits_cap=None),
    "values as they are": changed(value_norm=False),
}
MEANS = {r"layer_scalar|router\.scale|per_expert_scale": 1.0}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
EXPERT_FAULTS = {
    "dense MLP's norm for the experts": swapped("pre_feedforward_layernorm_2.", "pre_feedforward_layernorm."),
    "output norms of the other branch": swapped("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
    "no factors of experts": zeroed(r"per_expert_scale"),
    "scales of other inputs of the router": rolled(r"router\.scale"),
}
# As E2B: keys and values of two kinds of layers are shared, and the sharing layers have wider MLPs.
ELASTIC = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention", "full_attention"] * 3],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "attention_k_eq_v": False,
    "num_key_value_heads": 2,
}
WHOLE = "TP2", "TP2 SP", "CP2"
NO_SWAP = {"q_norm and k_norm swapped": None}  # the layers that share keys have no k_norm
ELASTIC_FAULTS = NO_SWAP | {
    "keys of another layer": keys_of_another_layer(),
    "vectors of other tokens": rolled("embed_tokens_per_layer"),
    "vectors of other layers": rolled("embed_tokens_per_layer", dim=1),
    "no projection of embeddings": zeroed("per_layer_model_projection"),
    "gates of other layers": swapped("0.per_layer_input_gate", "1.per_layer_input_gate"),
}
TINY = {
    "": Tiny(config, (*DENSE, *RECOMPUTE), means=MEANS, faults=FAULTS),
    "values": Tiny(partial(config, attention_k_eq_v=False), ("TP2 SP",), means=MEANS, faults=FAULTS),
    # With scores so close to each other as others' are, rounding to bf16 would choose other experts.
    "experts": Tiny(
        partial(config, **EXPERTS),
        (*MOE, "TP2 SP recompute"),
        means=MEANS,
        stds={r"router\.proj": 2.0},
        faults=FAULTS | EXPERT_FAULTS,
    ),
    # Layers on one pipeline stage: each reads the embeddings.
    "layer inputs": Tiny(
        partial(config, **ELASTIC), (*WHOLE, "TP2 SP recompute"), means=MEANS, faults=FAULTS | ELASTIC_FAULTS
    ),
    "layer inputs within": Tiny(
        partial(config, **ELASTIC | {"use_double_wide_mlp": False, "num_key_value_heads": 1}),
        ("TP2",),
        means=MEANS,
        files=within,
        raw=nested,
        extra=unread,
        faults=NO_SWAP,
    ),
    "within": Tiny(config, ("PP2",), means=MEANS, files=within, raw=nested, extra=unseen),
}
