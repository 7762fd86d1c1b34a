"""Mixtral: experts by other names; a sliding window in every layer."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import swapped


def config(**changes):
    from transformers import MixtralConfig

    moe = {"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False, "head_dim": 16}
    return MixtralConfig(**SHARED | {"rope_parameters": ROPE} | moe | changes)


TINY = {
    "": Tiny(config, MOE, faults={"gate and up of the experts swapped": swapped(".w1.", ".w3.")}),
    "window": Tiny(partial(config, sliding_window=7), ("CP2",)),
}
