"""Nemotron: LayerNorms that add 1 and have biases, a squared ReLU, half of each head turns; or biases, all turns."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny
from tests.bridge.families.arcee import another_activation
from tests.bridge.families.faults import zeroed


def config(**changes):
    from transformers import NemotronConfig

    rope = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
    return NemotronConfig(**SHARED | rope | {"head_dim": 16, "norm_eps": 1e-3} | changes)


MEANS = {r"norm\.weight$": 0.0}
FAULTS = {"another activation": another_activation(), "norms without biases": zeroed(r"norm\.bias")}
BIASES = {
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
}
TINY = {
    "": Tiny(config, means=MEANS, faults=FAULTS),
    "biases": Tiny(partial(config, **BIASES), layouts=(), means=MEANS, faults=FAULTS),
}
