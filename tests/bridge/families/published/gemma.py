"""Gemma 1, 2 and 4; Gemma 3 is in dense.py."""

from tests.bridge.families.published.model import Published


def _gemma(hidden, inner, layers, heads, groups, **changes):
    return {
        "architectures": ["GemmaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 8192,
        "model_type": "gemma",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 256000,
        **changes,
    }


GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "model_type": "gemma2",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "num_attention_heads": 32,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262144,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "default_output_length": 280,
        "head_dim": 72,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "max_position_embeddings": 131072,
        "model_type": "gemma4_vision",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10240,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        "standardize": True,
        "use_clipped_linears": False,
    },
}
GEMMA4_26B = GEMMA4_31B | {
    "text_config": GEMMA4_31B["text_config"]
    | {
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    },
}
GEMMA4_E4B = GEMMA4_31B | {
    "text_config": GEMMA4_31B["text_config"]
    | {
        "attention_k_eq_v": False,
        "hidden_size": 2560,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 10240,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 262144,
    },
    "vision_config": GEMMA4_31B["vision_config"]
    | {
        "head_dim": 64,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 16,
        "num_key_value_heads": 12,
        "standardize": False,
        "use_clipped_linears": True,
    },
}
GEMMA4_E2B = GEMMA4_E4B | {
    "text_config": GEMMA4_E4B["text_config"]
    | {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
}
GEMMA4_12B = {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "model_type": "gemma4_unified",
    "text_config": GEMMA4_31B["text_config"]
    | {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
        "model_type": "gemma4_unified_text",
        "num_attention_heads": 16,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
        "model_type": "gemma4_unified_vision",
        "output_proj_dims": 3840,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "rms_norm_eps": 1e-06,
    },
}
GEMMA4_TOWERS = ("model.vision_tower.std_bias", "model.embed_vision.embedding_projection.weight")
# The last layer attends to the keys of another; files have its own nonetheless.
GEMMA4_SHARED = (*GEMMA4_TOWERS, "model.language_model.layers.34.self_attn.k_proj.weight")

MODELS = {
    "gemma-4-12B-it": Published(
        "gemma4_unified_text", "11907350320", GEMMA4_12B, ("model.vision_embedder.patch_ln1.weight",)
    ),
    "gemma-4-26B-A4B-it": Published("gemma4_text", "25.2", GEMMA4_26B, GEMMA4_TOWERS),
    "gemma-4-E2B-it": Published("gemma4_text", "4628569379", GEMMA4_E2B, GEMMA4_SHARED),  # the text model alone
    "gemma-4-E4B-it": Published("gemma4_text", "7463013418", GEMMA4_E4B, GEMMA4_SHARED),
    "gemma-4-31B-it": Published("gemma4_text", "30.7", GEMMA4_31B, GEMMA4_TOWERS),
    "gemma-2b": Published("gemma", "2506172416", _gemma(2048, 16384, 18, 8, 1)),
    "gemma-7b": Published("gemma", "8537680896", _gemma(3072, 24576, 28, 16, 16)),
    "gemma-2-2b-it": Published("gemma2", "2614341888", _gemma(2304, 9216, 26, 8, 4, **GEMMA2)),
    "gemma-2-9b-it": Published("gemma2", "9241705984", _gemma(3584, 14336, 42, 16, 8, **GEMMA2)),
    "gemma-2-27b-it": Published(
        "gemma2",
        "27227128320",
        _gemma(4608, 36864, 46, 32, 16, **GEMMA2 | {"head_dim": 128, "query_pre_attn_scalar": 144}),
    ),
}
