"""Hunyuan dense: norms of rotated queries and keys, and a rope whose base grows; or a plain one, and biases."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny
from tests.bridge.families.faults import Fault, rolled

GROWN = {"rope_type": "dynamic", "rope_theta": 50.0, "alpha": 9.0, "factor": 1.0}


def config(**changes):
    from transformers import HunYuanDenseV1Config

    return HunYuanDenseV1Config(**SHARED | {"rope_parameters": GROWN, "head_dim": 16} | changes)


def norms_before_rope() -> Fault:
    def plant(model):
        for core in (module for chunk in model.chunks for module in chunk.modules() if hasattr(module, "l2_norm")):
            norms, core.q_layernorm, core.k_layernorm = (core.q_layernorm, core.k_layernorm), None, None
            core.register_forward_pre_hook(
                lambda _, heads, norms=norms: (norms[0](heads[0]), norms[1](heads[1]), *heads[2:])
            )

    return Fault(model=plant)


FAULTS = {
    # A score is symmetric in the two norms behind the rope: to swap them changes nothing.
    "norm of the queries out of place": rolled("query_layernorm"),
    "norms before the rope": norms_before_rope(),
}
MEANS = {r"(query|key)_layernorm\.weight$": 1.0}
PLAIN = {"rope_parameters": ROPE, "attention_bias": True, "tie_word_embeddings": True}
TINY = {
    "": Tiny(config, means=MEANS, faults=FAULTS),
    "plain rope": Tiny(partial(config, **PLAIN), layouts=(), means=MEANS),
}
