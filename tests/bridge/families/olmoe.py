"""OLMoE: norms over all heads together, half as many key heads; the experts' weights do not sum up to 1."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import rolled


def config(**changes):
    from transformers import OlmoeConfig

    moe = {"num_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": False}
    return OlmoeConfig(**SHARED | {"rope_parameters": ROPE, "intermediate_size": 40} | moe | changes)


# The two norms have different lengths: they cannot be swapped.
FAULTS = {"q_norm and k_norm swapped": None, "norm of the queries out of place": rolled("q_norm")}

TINY = {
    "": Tiny(config, MOE, faults=FAULTS),
    "normalised": Tiny(partial(config, norm_topk_prob=True, attention_bias=True), ("EP2",), faults=FAULTS),
}
