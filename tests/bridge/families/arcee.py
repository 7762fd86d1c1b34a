"""Arcee: MLPs of a squared ReLU and no gate; or biases on all matrices."""

from dataclasses import replace
from functools import partial

from tests.bridge.families import ROPE, SHARED, YARN, Tiny
from tests.bridge.families.faults import Fault


def config(**changes):
    from transformers import ArceeConfig

    return ArceeConfig(**SHARED | {"rope_parameters": ROPE, "head_dim": 16} | changes)


def another_activation() -> Fault:
    """A GELU in place of the squared ReLU."""
    return Fault(architecture=lambda about: replace(about, transformer=about.transformer | {"activation_func": "gelu"}))


FAULTS = {"another activation": another_activation()}
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN}
TINY = {
    "": Tiny(config, faults=FAULTS),
    "biases": Tiny(partial(config, **BIASES), layouts=("TP2 SP",), faults=FAULTS),
}
