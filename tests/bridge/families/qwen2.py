"""Qwen2: biases on queries, keys and values; tied. With windows from the third layer on, and YaRN."""

from functools import partial

from tests.bridge.families import DENSE, ROPE, SHARED, YARN, Tiny


def config(**changes):
    from transformers import Qwen2Config

    return Qwen2Config(**SHARED | {"rope_parameters": ROPE, "tie_word_embeddings": True} | changes)


WINDOWS = {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2, "rope_parameters": YARN}
TINY = {
    "": Tiny(config, layouts=(*DENSE, "PP2 VPP2", "PP2 VPP3 accounted", "PP2 uneven", "TP2 SP PP2 VPP2")),
    "windows": Tiny(partial(config, **WINDOWS), layouts=("CP2", "PP2 VPP2", "PP2 VPP2 by letters")),
}
