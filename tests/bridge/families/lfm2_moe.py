"""LFM2 with experts, a dense layer first and biases on scores; or without these biases and without normalization."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED_WITHOUT_EPS, Tiny
from tests.bridge.families.lfm2 import FAULTS, SIZES, TYPES

EXPERTS = {
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
    "num_experts_per_tok": 3,
    "num_experts": 8,
    "routed_scaling_factor": 1.4,
}


def config(**changes):
    from transformers import Lfm2MoeConfig

    return Lfm2MoeConfig(
        **SHARED_WITHOUT_EPS | SIZES | EXPERTS | {"rope_parameters": ROPE, "layer_types": TYPES} | changes
    )


TINY = {
    "": Tiny(config, layouts=(*MOE, "TP2 SP recompute"), faults=FAULTS, fp32=("expert_bias",)),
    "without biases": Tiny(partial(config, use_expert_bias=False, norm_topk_prob=False), layouts=("TP2 SP EP2",)),
}
