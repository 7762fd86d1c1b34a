"""GLM-4, Gemma, Phi and Granite."""

from tests.bridge.families.published.model import Published

GLM_4_9B = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}
GLM_TOWER = {
    "attention_bias": False,
    "depth": 24,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "image_size": 336,
    "in_channels": 3,
    "intermediate_size": 13696,
    "num_heads": 12,
    "out_hidden_size": 4096,
    "patch_size": 14,
    "rms_norm_eps": 1e-05,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
GLM_TOWER_TENSORS = ("model.visual.downsample.weight", "model.visual.blocks.23.attn.qkv.weight")
GLM_4_1V = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "image_token_id": 151343,
    "model_type": "glm4v",
    "text_config": {key: value for key, value in GLM_4_9B.items() if key not in ("architectures", "head_dim")}
    | {
        "max_position_embeddings": 65536,
        "model_type": "glm4v_text",
        "rope_scaling": {"mrope_section": [8, 12, 12], "type": "default"},
    },
    "tie_word_embeddings": False,
    "vision_config": GLM_TOWER | {"model_type": "glm4v"},
}


def _gemma3(hidden, inner, layers, heads, groups, window, **changes):
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "vocab_size": 262144,
        **changes,
    }


GEMMA3_270M = _gemma3(
    640,
    2048,
    18,
    4,
    1,
    512,
    _sliding_window_pattern=6,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
    use_bidirectional_attention=False,
)
del GEMMA3_270M["sliding_window_pattern"]
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
GEMMA3_27B = GEMMA3_4B | {
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
}
GEMMA3_VISION = (
    "multi_modal_projector.mm_input_projection_weight",
    "multi_modal_projector.mm_soft_emb_norm.weight",
    "vision_tower.vision_model.embeddings.position_embedding.weight",
    "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.bias",
    "vision_tower.vision_model.post_layernorm.weight",
)


def _phi3(**changes):
    return {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
        **changes,
    }


def _long(planes):
    """As Phi's rule of long texts is; the factors themselves are of no matter here."""
    return {"long_factor": [4.0] * planes, "short_factor": [1.0] * planes, "type": "longrope"}


def _granite(**changes):
    return {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "granite",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49159,
        **changes,
    }


MODELS = {
    "GLM-4-9B-0414": Published("glm4", "9400279040", GLM_4_9B),
    "GLM-4.1V-9B-Thinking": Published("glm4v_text", "9400279040", GLM_4_1V, GLM_TOWER_TENSORS),
    "GLM-4-32B-0414": Published(
        "glm4",
        "32566081536",
        GLM_4_9B
        | {
            "attention_bias": False,
            "hidden_size": 6144,
            "intermediate_size": 23040,
            "num_attention_heads": 48,
            "num_hidden_layers": 61,
        },
    ),
    "gemma-3-270m": Published("gemma3_text", "268098176", GEMMA3_270M),
    "gemma-3-1b-it": Published("gemma3_text", "999885952", _gemma3(1152, 6912, 26, 4, 1, 512)),
    "gemma-3-4b-it": Published("gemma3_text", "3880263168", GEMMA3_4B, GEMMA3_VISION),
    "gemma-3-27b-it": Published("gemma3_text", "27009346304", GEMMA3_27B, GEMMA3_VISION),
    "Phi-3-mini-4k-instruct": Published("phi3", "3821079552", _phi3()),
    "Phi-3-mini-128k-instruct": Published(
        "phi3", "3821079552", _phi3(max_position_embeddings=131072, rope_scaling=_long(48), sliding_window=262144)
    ),
    "Phi-3.5-mini-instruct": Published(
        "phi3", "3821079552", _phi3(max_position_embeddings=131072, rope_scaling=_long(48), sliding_window=262144)
    ),
    "phi-4": Published(
        "phi3",
        "14659507200",
        _phi3(
            hidden_size=5120,
            intermediate_size=17920,
            max_position_embeddings=16384,
            num_attention_heads=40,
            num_hidden_layers=40,
            num_key_value_heads=10,
            original_max_position_embeddings=16384,
            rope_theta=250000,
            sliding_window=None,
            vocab_size=100352,
        ),
    ),
    "Phi-4-mini-instruct": Published(
        "phi3",
        "3836021760",
        _phi3(
            full_attn_mod=1,
            interpolate_factor=1,
            lm_head_bias=False,
            max_position_embeddings=131072,
            mlp_bias=False,
            num_attention_heads=24,
            num_key_value_heads=8,
            partial_rotary_factor=0.75,
            rope_scaling=_long(48),
            sliding_window=262144,
            tie_word_embeddings=True,
            vocab_size=200064,
        ),
    ),
    "granite-3.3-2b-instruct": Published(
        "granite",
        "2533539840",
        _granite(attention_multiplier=0.015625, hidden_size=2048, intermediate_size=8192, logits_scaling=8.0),
    ),
    "granite-3.3-8b-instruct": Published(
        "granite",
        "8170864640",
        _granite(attention_multiplier=0.0078125, hidden_size=4096, intermediate_size=12800, logits_scaling=16.0),
    ),
}
