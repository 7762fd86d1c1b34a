"""Kimi-Linear: Kimi delta attention and latent attention without positions; a dense layer, then experts in groups."""

import re

from tests.bridge.families import MOE, SHARED, Tiny
from tests.bridge.families.faults import rolled, zeroed
from tests.bridge.families.qwen3_next import leaking, planted, ungated

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_head_dim": 10,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
}


def config(**changes):
    from transformers import KimiLinearConfig

    return KimiLinearConfig(**SHARED | LATENT | changes)


def files(tensors):
    """Dense layers have other names in published files than transformers saves."""
    return {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): tensor for name, tensor in tensors.items()}


FAULTS = {
    "states leak": leaking("KimiDeltaAttention", "slots", "steps"),
    "convolution leaks": leaking("KimiDeltaAttention", "conv_slots", "conv_length"),
    "gate dropped": planted("KimiDeltaAttention", ungated),
    "decays of other heads": rolled("A_log", 2),
    "decays of other channels": rolled("f_b_proj"),
    "decays without bias": zeroed("dt_bias"),
    "channels of the convolution out of place": rolled("k_conv1d"),
    "keys of other channels": rolled("self_attn.k_proj"),
    "norm of other channels": rolled("o_norm"),
}
TINY = Tiny(
    config,
    layouts=(*MOE, "TP2 SP recompute", "PP2 recompute parts"),
    means={"A_log": -1.0},
    stds={"A_log": 0.5, "dt_bias": 0.5, "conv1d": 0.4},
    files=files,
    faults=FAULTS,
    fp32=(r"e_score_correction_bias", "A_log", "dt_bias"),
)
