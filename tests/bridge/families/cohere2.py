"""Command R7B: layers with a window and a rope beside layers with neither."""

from tests.bridge.families import ROPE, SHARED_WITHOUT_EPS, Tiny
from tests.bridge.families.cohere import FAULTS
from tests.bridge.families.smollm3 import rope_everywhere


def config(**changes):
    from transformers import Cohere2Config

    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    settings = {"layer_norm_eps": 1e-3, "logit_scale": 0.3, "layer_types": kinds, "sliding_window": 13}
    return Cohere2Config(**SHARED_WITHOUT_EPS | {"rope_parameters": ROPE} | settings | changes)


TINY = Tiny(config, faults=FAULTS | {"rope in every layer": rope_everywhere()})
