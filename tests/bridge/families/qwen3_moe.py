"""Qwen3-MoE: experts in all layers but one; routing weights normalised, or not (with windows and biases)."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny


def config(**changes):
    from transformers import Qwen3MoeConfig

    moe = {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    }
    return Qwen3MoeConfig(**SHARED | {"rope_parameters": ROPE} | moe | changes)


WINDOWS = {"use_sliding_window": True, "sliding_window": 13, "attention_bias": True}
TINY = {
    "": Tiny(config, layouts=(*MOE, "PP2 VPP2", "TP4 SP ETP4", "PP4", "EP4", "EP2 PP2", "TP2 SP EP2 ETP2")),
    "not normalised": Tiny(partial(config, norm_topk_prob=False, **WINDOWS), layouts=()),
}
