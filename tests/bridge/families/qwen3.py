"""Qwen3: norms on the heads; with one key head, which TP2 shares; with biases, windows by layer types, and YaRN."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, YARN, Tiny


def config(**changes):
    from transformers import Qwen3Config

    settings = {"rope_parameters": ROPE, "head_dim": 16, "tie_word_embeddings": False}
    return Qwen3Config(**SHARED | settings | changes)


BIASES = {
    "attention_bias": True,
    "use_sliding_window": True,
    "sliding_window": 13,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False},
}
TINY = {
    "": Tiny(config),
    "one KV head": Tiny(partial(config, num_key_value_heads=1), layouts=("TP2 SP", "TP4 SP")),
    "biases": Tiny(partial(config, **BIASES), layouts=("TP2 SP",)),
}
