"""Rows of models with linear, latent or wide attention, at published sizes, with as many layers as one GPU trains."""

# pyright: reportMissingImports=false

from typing import Any

from row import BF16_MOMENTS, Row

LAYERS = 4
BFLOAT16 = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_hidden_layers": LAYERS,
    "tie_word_embeddings": False,
}
QWEN36_MOE: dict[str, Any] = BFLOAT16 | {  # Qwen3.6-35B-A3B
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262_144,
}
QWEN3_NEXT: dict[str, Any] = QWEN36_MOE | {  # Qwen3-Next-80B-A3B
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151_936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
LATENT = {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GLM47_FLASH: dict[str, Any] = (
    BFLOAT16
    | LATENT
    | {  # GLM-4.7-Flash, without the layer that predicts further tokens
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "vocab_size": 154_880,
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 202_752,
    }
)
KIMI_LINEAR: dict[str, Any] = (
    BFLOAT16
    | LATENT
    | {  # Kimi-Linear-48B-A3B
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [LAYERS],  # counted from 1
            "kda_layers": [*range(1, LAYERS)],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446,
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "model_max_length": 1_048_576,
    }
)
GEMMA4: dict[str, Any] = BFLOAT16 | {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
}
GEMMA4_26B = GEMMA4 | {  # the text model of Gemma 4 26B-A4B
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
GEMMA4_E2B = GEMMA4 | {  # the text model of Gemma 4 E2B, whole
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "sliding_window": 512,
}
LAYOUT = BF16_MOMENTS  # so that Kimi-Linear's fit one H200
HYBRIDS = {
    "qwen3.6-moe-4": Row("Qwen3.6-35B-A3B, 4 layers", QWEN36_MOE, 2, 16, layout=LAYOUT),
    "glm-4.7-flash-4": Row("GLM-4.7-Flash, 4 layers", GLM47_FLASH, 2, 16, layout=LAYOUT),
    "qwen3-next-4": Row(
        "Qwen3-Next-80B-A3B, 4 layers",
        QWEN3_NEXT,
        2,
        16,
        layout=LAYOUT,
        peer="--moe_permute_fusion true",
        min_speedup={"ours": 3.0},
    ),
    "gemma-4-26b-6": Row("Gemma 4 26B-A4B, 6 layers", GEMMA4_26B, 2, 16, layout=LAYOUT),
    "gemma-4-e2b": Row("Gemma 4 E2B", GEMMA4_E2B, 2, 16, layout=LAYOUT),
    "kimi-linear-4": Row("Kimi-Linear-48B-A3B, 4 layers", KIMI_LINEAR, 2, 16, layout=LAYOUT),
}
