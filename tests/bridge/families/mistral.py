"""Mistral: a window shorter than the documents in every layer; heads whose size is a setting of its own."""

from tests.bridge.families import ROPE, SHARED, Tiny


def config(**changes):
    from transformers import MistralConfig

    return MistralConfig(**SHARED | {"rope_parameters": ROPE, "head_dim": 16, "sliding_window": 13} | changes)


TINY = Tiny(config)
