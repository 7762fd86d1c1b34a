"""Qwen3: norms on the heads; its variant has one key head, which TP2 shares."""

from functools import partial

from tests.families import ROPE, SHARED, Tiny


def config(**changes):
    from transformers import Qwen3Config

    settings = {"rope_parameters": ROPE, "head_dim": 16, "tie_word_embeddings": False}
    return Qwen3Config(**SHARED | settings | changes)


TINY = {
    "": Tiny(config),
    "one KV head": Tiny(partial(config, num_key_value_heads=1), layouts=("TP2 SP", "TP4 SP")),
}
