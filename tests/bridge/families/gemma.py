"""Gemma: norms that add 1, one key head, a scaled embedding; or biases and an output layer of its own."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny

MEANS = {r"norm\.weight$": 0.0}


def config(**changes):
    from transformers import GemmaConfig

    return GemmaConfig(**SHARED | {"rope_parameters": ROPE, "head_dim": 16, "num_key_value_heads": 1} | changes)


BIASES = {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4}
TINY = {
    "": Tiny(config, means=MEANS),
    "biases": Tiny(partial(config, **BIASES), layouts=(), means=MEANS),
}
