"""EXAONE 4: layers with a window and a rope beside layers with neither; or no windows, and a rope everywhere."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny
from tests.bridge.families.faults import swapped
from tests.bridge.families.smollm3 import rope_everywhere


def config(**changes):
    from transformers import Exaone4Config

    settings = {
        "head_dim": 16,
        "sliding_window": 13,
        "sliding_window_pattern": "LGGL",
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": ROPE,
    }
    return Exaone4Config(**SHARED | settings | changes)


PLAIN = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 4}
NORMS = {"norms behind the branches": swapped("post_attention_layernorm", "post_feedforward_layernorm")}
TINY = {
    "": Tiny(config, faults=NORMS | {"rope in every layer": rope_everywhere()}),
    "no windows": Tiny(partial(config, tie_word_embeddings=True, **PLAIN), layouts=(), faults=NORMS),
}
