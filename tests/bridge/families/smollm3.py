"""SmolLM3: a layer without positions among three with a rope; or windows there, and biases on all matrices."""

from dataclasses import replace
from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny
from tests.bridge.families.faults import Fault


def config(**changes):
    from transformers import SmolLM3Config

    return SmolLM3Config(**SHARED | {"rope_parameters": ROPE, "no_rope_layer_interval": 3} | changes)


def rope_everywhere() -> Fault:
    """A rope also in the layers without one."""
    return Fault(
        architecture=lambda about: replace(about, layers=tuple(replace(each, rope=0) for each in about.layers))
    )


FAULTS = {"rope in every layer": rope_everywhere()}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 13,
    "no_rope_layers": [1, 0, 0, 1],
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}
TINY = {
    "": Tiny(config, faults=FAULTS),
    "windows": Tiny(partial(config, **WINDOWS), layouts=("TP2 SP",), faults=FAULTS),
}
