"""K-EXAONE: layers with a window and a rope beside layers with neither, and experts in more groups than one."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.smollm3 import rope_everywhere


def config(**changes):
    from transformers import ExaoneMoeConfig

    settings = {
        "head_dim": 16,
        "sliding_window": 13,
        "sliding_window_pattern": "LGGL",
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": ROPE,
    }
    return ExaoneMoeConfig(**SHARED | settings | changes)


def predicting(config, noise):
    """Return the tensors of the layer that predicts further tokens."""
    return {"mtp.fc.weight": noise(48, 96)}


FP32 = ("e_score_correction_bias",)
FAULTS = {"rope in every layer": rope_everywhere()}
ODD = {"first_k_dense_replace": 3, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
TINY = {
    "": Tiny(config, MOE, fp32=FP32, extra=predicting, faults=FAULTS),
    "odd layers": Tiny(partial(config, **ODD), (), fp32=FP32, faults=FAULTS),
}
