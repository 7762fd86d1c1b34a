"""Configs of more published models, as their config.json has them, for published.py."""

from typing import Any

from configs import GPT_OSS_20B, QWEN3, QWEN3_235B, QWEN3_MOE, SIZES, TIED, TOWERS, qwen3_vl

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_act": "silu",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
QWEN25: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 152_064,
    "hidden_act": "silu",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {  # attention and experts of DeepSeek-V2 and V3
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = LATENT | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}


def _sized(base: dict[str, Any], hidden: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return base | sizes | more


# Config and billions of parameters, as the models' cards have them.
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "Llama-3.2-1B": (_sized(LLAMA, 2048, 8192, 16, 32, **TIED), 1.24),
    "Llama-3.1-8B": (_sized(LLAMA, 4096, 14_336, 32, 32), 8.03),
    "Llama-3.1-70B": (_sized(LLAMA, 8192, 28_672, 80, 64), 70.55),
    "Llama-3.1-405B": (_sized(LLAMA, 16_384, 53_248, 126, 128), 405.85),
    "Qwen2.5-7B": (_sized(QWEN25, 3584, 18_944, 28, 28, num_key_value_heads=4), 7.62),
    "Qwen2.5-14B": (_sized(QWEN25, 5120, 13_824, 48, 40), 14.77),
    "Qwen2.5-72B": (_sized(QWEN25, 8192, 29_568, 80, 64), 72.71),
    "Qwen3-4B": (QWEN3 | SIZES["4b"] | TIED, 4.02),
    "Qwen3-8B": (QWEN3 | SIZES["8b"], 8.19),
    "Qwen3-14B": (_sized(QWEN3, 5120, 17_408, 40, 40), 14.77),
    "Qwen3-32B": (QWEN3 | SIZES["32b"], 32.76),
    "Qwen3-30B-A3B": (QWEN3_MOE | {"num_hidden_layers": 48}, 30.53),
    "Qwen3-235B-A22B": (QWEN3_235B, 235.09),
    "Qwen3-VL-8B": (qwen3_vl(QWEN3 | SIZES["8b"], TOWERS["30b"]), 8.77),
    "gpt-oss-20b": (GPT_OSS_20B, 20.91),
    "gpt-oss-120b": (
        GPT_OSS_20B
        | {"num_hidden_layers": 36, "layer_types": ["sliding_attention", "full_attention"] * 18}
        | {"num_local_experts": 128},
        116.83,
    ),
    "Moonlight-16B-A3B": (
        _sized(DEEPSEEK_V3, 2048, 11_264, 27, 16, num_key_value_heads=16, q_lora_rank=None, vocab_size=163_840)
        | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446},
        15.96,
    ),
    "DeepSeek-V2-Lite": (
        _sized(LATENT, 2048, 10_944, 27, 16, num_key_value_heads=16, q_lora_rank=None, vocab_size=102_400)
        | {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "moe_intermediate_size": 1408}
        | {
            "norm_topk_prob": False,
            "n_routed_experts": 64,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
        },
        15.71,
    ),
    "DeepSeek-V3": (DEEPSEEK_V3, 671.03),
    "GLM-4.5-Air": (
        {
            "model_type": "glm4_moe",
            "architectures": ["Glm4MoeForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": 151_552,
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": False,
        },
        106.85,
    ),
}
