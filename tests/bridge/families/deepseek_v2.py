"""DeepSeek-V2: multi-latent attention with YaRN, groups of experts as good as their best; V2-Lite has no groups."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 18,
    "q_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "rms_norm_eps": 1e-4,  # the latents' norms have 1e-6 whatever it says
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
    "original_max_position_embeddings": 16,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "tie_word_embeddings": False,
}


def config(**changes):
    from transformers import DeepseekV2Config

    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    return DeepseekV2Config(**SHARED | LATENT | EXPERTS | {"rope_parameters": YARN} | groups | changes)


LITE = {"rope_parameters": ROPE, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
TINY = {
    "": Tiny(config, layouts=(*MOE, "TP2 SP PP2")),
    "Lite": Tiny(partial(config, **LITE), layouts=("TP2 SP EP2",)),
}
