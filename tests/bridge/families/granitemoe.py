"""Granite with experts: a factor at each place that has one, experts stacked; or biases."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import rolled

FACTORS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.7,
}
EXPERTS = {"intermediate_size": 40, "num_local_experts": 8, "num_experts_per_tok": 3}


def config(**changes):
    from transformers import GraniteMoeConfig

    return GraniteMoeConfig(**SHARED | FACTORS | EXPERTS | {"rope_parameters": ROPE} | changes)


FAULTS = {"experts out of place": rolled("input_linear")}
TINY = {
    "": Tiny(config, MOE, faults=FAULTS),
    "biases": Tiny(partial(config, attention_bias=True, tie_word_embeddings=True), (), faults=FAULTS),
}
