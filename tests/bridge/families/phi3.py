"""Phi-3 and Phi-4: fused matrices; LongRoPE on a part of each head, its short factors and its long ones.

Each document turns by the factors for its own length, and transformers' padded batches by those for the longest row:
here all documents are on one side, see tests/bridge/layers/test_layers.py for packs of both.
"""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny


def config(**changes):
    from transformers import Phi3Config

    return Phi3Config(**SHARED | {"rope_parameters": ROPE, "sliding_window": 13} | changes)


def longrope(original: int, **changes):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.3, 1.9, 3.1],
        "long_factor": [1.1, 2.3, 4.9, 7.1],
        "attention_factor": 1.1,
    }
    settings = {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": None}
    return config(**settings | {"rope_parameters": rope, "original_max_position_embeddings": original} | changes)


TINY = {
    "": Tiny(config),
    "short factors": Tiny(partial(longrope, 128), layouts=("PP2",)),
    "long factors": Tiny(partial(longrope, 1), layouts=("CP2",)),
}
