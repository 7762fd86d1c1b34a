"""Granite: a factor at each place that has one."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny


def config(**changes):
    from transformers import GraniteConfig

    factors = {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.7,
    }
    return GraniteConfig(**SHARED | factors | {"rope_parameters": ROPE, "tie_word_embeddings": True} | changes)


BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
TINY = {"": Tiny(config), "biases": Tiny(partial(config, **BIASES), layouts=("TP2 SP",))}
