"""Qwen2-MoE: a wide shared expert behind a sigmoid gate; a dense layer; weights of experts normalised or not."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import swapped, zeroed


def config(**changes):
    from transformers import Qwen2MoeConfig

    moe = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [2],
        "tie_word_embeddings": False,
    }
    return Qwen2MoeConfig(**SHARED | {"rope_parameters": ROPE} | moe | changes)


FAULTS = {
    "shared gate dropped": zeroed(r"shared_expert_gate"),
    "gate and up of the experts swapped": swapped("gate_proj", "up_proj"),
}

TINY = {
    "": Tiny(config, MOE, faults=FAULTS),
    "normalised": Tiny(partial(config, norm_topk_prob=True, qkv_bias=False), ("EP2",)),
    "windows": Tiny(
        partial(config, use_sliding_window=True, sliding_window=7, max_window_layers=3, mlp_only_layers=[]), ("CP2",)
    ),
    "one expert": Tiny(partial(config, norm_topk_prob=True, num_experts_per_tok=1), ("TP2 SP EP2",)),
}
