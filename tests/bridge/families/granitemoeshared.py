"""Granite with experts and a shared expert; or without the shared one."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import zeroed
from tests.bridge.families.granitemoe import EXPERTS, FACTORS, FAULTS


def config(**changes):
    from transformers import GraniteMoeSharedConfig

    settings = {"rope_parameters": ROPE, "shared_intermediate_size": 28, "tie_word_embeddings": True}
    return GraniteMoeSharedConfig(**SHARED | FACTORS | EXPERTS | settings | changes)


TINY = {
    "": Tiny(config, MOE, faults=FAULTS | {"no shared expert": zeroed("shared_mlp.output_linear")}),
    "routed only": Tiny(partial(config, shared_intermediate_size=0), layouts=(), faults=FAULTS),
}
