"""LFM2: short convolutions and attention by turns; named and sized as in published files."""

from functools import partial

from tests.bridge.families import DENSE, ROPE, SHARED_WITHOUT_EPS, Tiny
from tests.bridge.families.faults import rolled, swapped
from tests.bridge.families.qwen3_next import leaking, planted, ungated

TYPES = ["conv", "full_attention", "conv", "conv"]
SIZES = {"hidden_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14, "conv_L_cache": 3}


def config(**changes):
    from transformers import Lfm2Config

    settings = {"rope_parameters": ROPE, "layer_types": TYPES, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-4}
    return Lfm2Config(**SHARED_WITHOUT_EPS | SIZES | settings | changes)


FAULTS = {
    "convolution leaks": leaking("ShortConv", "conv_slots", "conv_length"),
    "exit gate dropped": planted("ShortConv", ungated),
    "channels of the convolution out of place": rolled(r"conv\.conv"),
    "projections of other channels": rolled(r"conv\.in_proj"),
    "gate and up swapped": swapped(".w1.", ".w3."),
}
PUBLISHED = {"layer_types": None, "full_attn_idxs": [1], "block_ff_dim": 70, "intermediate_size": None}
TINY = {
    "": Tiny(config, layouts=(*DENSE, "TP2 SP recompute", "PP2 recompute parts"), faults=FAULTS),
    # The MLP's width is 3 * 16, and not tied by its older name.
    "published": Tiny(
        partial(config, block_auto_adjust_ff_dim=True, block_multiple_of=16, intermediate_size=70, tie_embedding=False),
        layouts=("TP2",),
        raw=PUBLISHED | {"tie_word_embeddings": None, "tie_embedding": False},
    ),
}
