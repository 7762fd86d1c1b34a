"""Gemma 2: windows in every other layer, four norms that add 1, and caps below most scores and logits; or no caps."""

from functools import partial

from tests.bridge.families import DENSE, RECOMPUTE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import changed, swapped
from tests.bridge.families.gemma import MEANS


def config(**changes):
    from transformers import Gemma2Config

    settings = {
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.5,
        "head_dim": 16,
        "query_pre_attn_scalar": 11,
        "rope_parameters": ROPE,
        "sliding_window": 13,
    }
    return Gemma2Config(**SHARED | settings | changes)


NORMS = {"norms behind the branches": swapped("post_attention_layernorm", "post_feedforward_layernorm")}
CAPS = {"no cap on scores": changed(score_cap=None), "no cap on logits": changed(logits_cap=None)}
WITHOUT = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
TINY = {
    "": Tiny(config, (*DENSE, *RECOMPUTE), means=MEANS, faults=NORMS | CAPS),
    "no caps": Tiny(partial(config, attention_bias=True, **WITHOUT), layouts=(), means=MEANS, faults=NORMS),
}
