"""Hy3: a dense layer first, sigmoid scores with a bias on the choice, a shared expert; the hub's names."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import zeroed


def config(**changes):
    from transformers import HYV3Config

    settings = {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "router_scaling_factor": 1.7,
        "num_nextn_predict_layers": 1,
        "rope_parameters": ROPE,
    }
    return HYV3Config(**SHARED | settings | changes)


def predicting(config, noise):
    """Return the tensors of the layer that predicts further tokens."""
    return {
        f"model.layers.{config.num_hidden_layers}.eh_proj.weight": noise(48, 96),
        f"model.layers.{config.num_hidden_layers}.final_layernorm.weight": noise(48, mean=1.0),
    }


FP32 = (r"mlp\.expert_bias",)
FAULTS = {
    "no bias on the choice": zeroed(r"mlp\.expert_bias"),
    "no shared expert": zeroed(r"shared_mlp\.down_proj"),
}
ODD = {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "num_shared_experts": 2, "attention_bias": True}
TINY = {
    "": Tiny(config, MOE, fp32=FP32, extra=predicting, faults=FAULTS),
    "odd layers": Tiny(partial(config, **ODD), ("TP2 SP EP2",), fp32=FP32, extra=predicting, faults=FAULTS),
}
