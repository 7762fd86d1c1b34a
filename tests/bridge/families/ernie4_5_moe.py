"""ERNIE 4.5 MoE: interleaved planes, shared experts, a bias on the choice, a least sum that most sums stay below."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import swapped


def config(**changes):
    from transformers import Ernie4_5_MoeConfig

    moe = {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 28,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_norm_min": 0.7,
        "tie_word_embeddings": True,
    }
    return Ernie4_5_MoeConfig(**SHARED | {"rope_parameters": ROPE} | moe | changes)


def predicting(config, noise):
    """What released checkpoints have beyond the model's layers (a part of it)."""
    return {
        "model.mtp_linear_proj.0.weight": noise(config.hidden_size, 2 * config.hidden_size),
        "model.mtp_emb_norm.0.weight": noise(config.hidden_size, mean=1.0),
        "model.mtp_block.0.mlp.up_proj.weight": noise(config.intermediate_size, config.hidden_size),
    }


FP32 = (r"mlp\.gate\.weight", "moe_statics")

TINY = {
    "": Tiny(
        config,
        (*MOE, "TP2 SP EP2 ETP2"),
        fp32=FP32,
        extra=predicting,
        faults={"gate and up swapped": swapped("gate_proj", "up_proj")},
    ),
    "interval": Tiny(
        partial(config, moe_layer_interval=2, moe_layer_end_index=-1, moe_num_shared_experts=0, moe_norm_min=1e-12),
        ("EP2",),
        fp32=FP32,
    ),
}
