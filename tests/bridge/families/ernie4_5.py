"""ERNIE 4.5 (dense): neighbouring dimensions turn; with biases on every matrix, and with none."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny


def config(**changes):
    from transformers import Ernie4_5Config

    return Ernie4_5Config(**SHARED | {"rope_parameters": ROPE, "head_dim": 16, "use_bias": True} | changes)


TINY = {"": Tiny(config), "no biases": Tiny(partial(config, use_bias=False, tie_word_embeddings=False), layouts=())}
