"""Gemma 3 text: windows and their own rope in two layers of three, a scaled one in the others; norms that add 1."""

from tests.families import SHARED, Tiny
from tests.families.faults import layers_changed, swapped


def config(**changes):
    from transformers import Gemma3TextConfig

    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    settings = {
        "head_dim": 16,
        "query_pre_attn_scalar": 11,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": ropes,
    }
    return Gemma3TextConfig(**SHARED | settings | changes)


FAULTS = {
    "rope of windows": layers_changed(rope=0),
    "norms behind the branches": swapped("post_attention_layernorm", "post_feedforward_layernorm"),
}
TINY = Tiny(config, means={r"norm\.weight$": 0.0}, faults=FAULTS)
