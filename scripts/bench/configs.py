"""Configs of published models, as their config.json has them: the shapes of the benchmark's checkpoints."""

from typing import Any

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 151_936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_30B = QWEN3_MOE | {"num_hidden_layers": 48}
QWEN3_235B = QWEN3_MOE | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
SIZES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36},
    "32b": {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024, "dtype": "float32"},
}
TIED = {"tie_word_embeddings": True}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.9,
    "attention_bias": True,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    | {"truncate": False, "original_max_position_embeddings": 4096},
    "max_position_embeddings": 131_072,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
    "initializer_range": 0.02,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOWERS = {
    "4b": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    "30b": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
    "tiny": {"depth": 3, "hidden_size": 48, "intermediate_size": 80, "deepstack_visual_indexes": [0, 1]}
    | {"num_heads": 4, "num_position_embeddings": 64},
}


# Special tokens of Qwen3-VL in the order of their ids, which end 279 rows before the end of the embedding.
VISION_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"]
VISION_SPECIAL += ["<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"]
VISION_SPECIAL += ["<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
UNUSED = 279


def special_ids(config: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the special tokens: the published ones in a Qwen3-VL, since ms-swift has them in its code."""
    if "vision_config" not in config:
        return {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    first = config["text_config"]["vocab_size"] - UNUSED - len(VISION_SPECIAL)
    return {token: first + number for number, token in enumerate(VISION_SPECIAL)}


def qwen3_vl(text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a Qwen3-VL with the decoder of a Qwen3 or Qwen3-MoE."""
    is_moe = text["model_type"] == "qwen3_moe"
    kind = "qwen3_vl_moe" if is_moe else "qwen3_vl"
    minor = text["head_dim"] * 5 // 32  # planes of the rope that are turned by height, and by width
    sections = [text["head_dim"] // 2 - 2 * minor, minor, minor]
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": sections}
    config = {
        "model_type": kind,
        "architectures": ["Qwen3VLMoeForConditionalGeneration" if is_moe else "Qwen3VLForConditionalGeneration"],
        "dtype": text["dtype"],
        "transformers_version": "4.57.0",  # without one, transformers warns of a wrong tokenizer
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text | {"model_type": f"{kind}_text", "rope_scaling": rope, "rope_theta": 5e6},
        "vision_config": VISION | tower | {"model_type": kind, "out_hidden_size": text["hidden_size"]},
    }
    del config["text_config"]["architectures"]
    ids = special_ids(config)
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return config | {f"{name}_token_id": ids[f"<|{token}|>"] for name, token in names.items()}
