"""OLMo 2: norms behind attention and MLP and none before them; norms over all heads of queries and of keys."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny
from tests.bridge.families.faults import rolled, swapped


def config(**changes):
    from transformers import Olmo2Config

    return Olmo2Config(**SHARED | {"rope_parameters": ROPE} | changes)


FAULTS = {
    "norms behind the branches": swapped("post_attention_layernorm", "post_feedforward_layernorm"),
    "q_norm and k_norm swapped": None,  # they have different lengths
    "norm of the queries out of place": rolled("q_norm"),
}
BIASED = partial(config, attention_bias=True, num_key_value_heads=4)
TINY = {"": Tiny(config, faults=FAULTS), "biases": Tiny(BIASED, layouts=("TP2 SP",), faults=FAULTS)}
