"""Apertus: xIELU with other numbers in each layer, for widths that are split too."""

from functools import partial

from tests.bridge.families import DENSE, RECOMPUTE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import swapped, zeroed


def config(**changes):
    from transformers import ApertusConfig

    # The class of xIELU makes its parameters of this dtype.
    return ApertusConfig(**SHARED | {"rope_parameters": ROPE, "head_dim": 16, "dtype": "float32"} | changes)


FAULTS = {
    "slopes swapped": swapped("alpha_p", "alpha_n"),
    "attention's norm in the MLP": swapped("attention_layernorm", "feedforward_layernorm"),
    "no linear part": zeroed("act_fn.beta"),
    "limit at 0": zeroed("act_fn.eps"),
}
MEANS = {r"act_fn\.beta": 0.5, r"act_fn\.eps": -1.0}
TINY = {
    "": Tiny(config, (*DENSE, *RECOMPUTE), means=MEANS, faults=FAULTS),
    "biases": Tiny(
        partial(config, attention_bias=True, tie_word_embeddings=True), layouts=(), means=MEANS, faults=FAULTS
    ),
}
