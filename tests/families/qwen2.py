"""Qwen2: biases on queries, keys and values; tied."""

from tests.families import DENSE, ROPE, SHARED, Tiny


def config(**changes):
    from transformers import Qwen2Config

    return Qwen2Config(**SHARED | {"rope_parameters": ROPE, "tie_word_embeddings": True} | changes)


TINY = Tiny(config, layouts=(*DENSE, "PP2 VPP2", "PP2 uneven", "TP2 SP PP2 VPP2"))
