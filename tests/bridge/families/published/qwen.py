"""Models of Qwen's architectures."""

from tests.bridge.families.published.model import FP8, Published


def _qwen2(hidden, inner, layers, heads, groups, tied=False, vocab=152064, **changes):
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": vocab,
        **changes,
    }


def _qwen3(hidden, inner, layers, heads, groups, tied=False, **changes):
    return _qwen2(hidden, inner, layers, heads, groups, tied, vocab=151936) | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        **changes,
    }


QWEN_2_5_7B = _qwen2(3584, 18944, 28, 28, 4)
HEAD = ("lm_head.weight",)  # in files of models whose head is the embedding
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def _qwen3_5(kind, layers, **changes):
    name = {"dense": "Qwen3_5", "moe": "Qwen3_5Moe"}[kind]
    model_type = {"dense": "qwen3_5", "moe": "qwen3_5_moe"}[kind]
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": model_type + "_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
        **changes,
    }
    return {
        "architectures": [name + "ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": changes.get("tie_word_embeddings", False),
        "vision_config": {"deepstack_visual_indexes": [], "model_type": model_type},
    }


QWEN_PREDICTING = (
    "mtp.fc.weight",
    "mtp.layers.0.input_layernorm.weight",
    "mtp.layers.0.mlp.experts.0.gate_proj.weight",
    "mtp.layers.0.self_attn.q_norm.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
)
QWEN3_5_EXTRA = (
    *QWEN_PREDICTING,
    "mtp.layers.0.mlp.experts.gate_up_proj",
    "model.visual.blocks.0.attn.qkv.bias",
    "model.visual.merger.linear_fc1.weight",
    "model.visual.patch_embed.proj.weight",
    "model.visual.pos_embed.weight",
)

# Flat on the hub: the text model's keys at the top.
QWEN_2_5_VL_7B = QWEN_2_5_7B | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "image_token_id": 151655,
    "max_position_embeddings": 128000,
    "model_type": "qwen2_5_vl",
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "sliding_window": 32768,
    "vision_config": {"depth": 32, "model_type": "qwen2_5_vl"},
    "vision_start_token_id": 151652,
}
QWEN_2_5_VL_TOWER = ("visual.patch_embed.proj.weight", "visual.merger.mlp.2.bias")
QWEN3_VL_TOWER = ("model.visual.pos_embed.weight", "model.visual.deepstack_merger_list.2.linear_fc2.bias")


def _qwen3_vl(model_type, name, text, tied=False):
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    inner = text | {"model_type": model_type + "_text", "rope_scaling": rope, "rope_theta": 5000000}
    skipped = ("architectures", "max_window_layers", "sliding_window", "torch_dtype", "use_sliding_window")
    return {
        "architectures": [name],
        "image_token_id": 151655,
        "model_type": model_type,
        "text_config": {key: value for key, value in inner.items() if key not in skipped},
        "tie_word_embeddings": tied,
        "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "model_type": model_type},
    }


INTERNVIT_TENSORS = ("vision_tower.embeddings.cls_token", "multi_modal_projector.layer_norm.bias")
INTERNVL3_5_8B = {
    "architectures": ["InternVLForConditionalGeneration"],
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151671,
    "model_type": "internvl",
    "projector_hidden_act": "gelu",
    "text_config": {k: v for k, v in _qwen3(4096, 12288, 36, 32, 8).items() if k != "architectures"},
    "tie_word_embeddings": False,
    "vision_config": {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "projection_dropout": 0.0,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
QWEN3_30B_A3B = _qwen3(2048, 6144, 48, 32, 4) | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
}

LLAVA_ONEVISION_7B = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
    "image_token_index": 151646,
    "model_type": "llava_onevision",
    "projector_hidden_act": "gelu",
    "text_config": QWEN_2_5_7B,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "video_token_index": 151647,
    "vision_aspect_ratio": "anyres_max_9",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 26,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
ONEVISION_TENSORS = (
    "vision_tower.vision_model.post_layernorm.bias",
    "multi_modal_projector.linear_1.bias",
    "image_newline",
)

OVIS2_1B = {
    "architectures": ["Ovis2ForConditionalGeneration"],
    "hidden_size": 896,
    "image_token_id": 151665,
    "model_type": "ovis2",
    "text_config": _qwen2(896, 4864, 24, 14, 2, tied=True, vocab=151936),
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_act": "silu",
        "hidden_size": 1024,
        "hidden_stride": 2,
        "image_size": 448,
        "intermediate_size": 2816,
        "mlp_bias": False,
        "num_attention_heads": 8,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "num_visual_indicator_tokens": 5,
        "patch_size": 14,
        "qkv_bias": False,
        "rms_norm_eps": 1e-05,
        "tokenize_function": "softmax",
        "vocab_size": 65536,
    },
    "visual_indicator_token_ids": [151666, 151667, 151668, 151669, 151670],
    "vocab_size": 151936,
}
OVIS2_TENSORS = (
    "model.vision_tower.transformer.rms_norm.weight",
    "model.vision_tower.head_norm.bias",
    "model.visual_embeddings_table.weight",
)

MODELS = {
    "Qwen2.5-7B-Instruct": Published("qwen2", "7615616512", QWEN_2_5_7B),
    "Qwen2.5-0.5B": Published(
        "qwen2", "494032768", _qwen2(896, 4864, 24, 14, 2, tied=True, vocab=151936, use_mrope=False)
    ),
    "DeepSeek-R1-Distill-Qwen-7B": Published(
        "qwen2", "7615616512", QWEN_2_5_7B | {"rope_theta": 10000, "sliding_window": 4096, "use_mrope": False}
    ),
    "Qwen1.5-MoE-A2.7B": Published(
        "qwen2_moe",
        "14315784192",
        _qwen2(2048, 5632, 24, 16, 16, vocab=151936)
        | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "max_position_embeddings": 8192,
            "max_window_layers": 21,
            "model_type": "qwen2_moe",
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
        },
    ),
    "Qwen2-57B-A14B": Published(
        "qwen2_moe",
        "57408658944",
        _qwen2(3584, 18944, 28, 28, 4, vocab=151936)
        | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "model_type": "qwen2_moe",
            "moe_intermediate_size": 2560,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 20480,
            "sliding_window": 65536,
        },
    ),
    "Qwen3-0.6B": Published("qwen3", "596049920", _qwen3(1024, 3072, 28, 16, 8, tied=True), HEAD),
    "Qwen3-8B": Published("qwen3", "8190735360", _qwen3(4096, 12288, 36, 32, 8)),
    "llava-onevision-qwen2-7b-ov-hf": Published("llava_onevision", "7615616512", LLAVA_ONEVISION_7B, ONEVISION_TENSORS),
    "Ovis2-1B-hf": Published("ovis2", "494032768", OVIS2_1B, OVIS2_TENSORS),
    "InternVL3_5-8B-HF": Published("qwen3", "8190735360", INTERNVL3_5_8B, INTERNVIT_TENSORS),
    "Qwen3-8B-FP8": Published("qwen3", "8190735360", _qwen3(4096, 12288, 36, 32, 8, quantization_config=FP8)),
    "DeepSeek-R1-0528-Qwen3-8B": Published(
        "qwen3",
        "8190735360",
        _qwen3(
            4096,
            12288,
            36,
            32,
            8,
            max_position_embeddings=131072,
            rope_scaling={
                "attn_factor": 0.8782488562869419,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "rope_type": "yarn",
            },
        ),
    ),
    "Qwen3-30B-A3B-Instruct-2507": Published("qwen3_moe", "30532122624", QWEN3_30B_A3B),
    "Qwen3-Next-80B-A3B-Instruct": Published("qwen3_next", "79674391296", QWEN3_NEXT, QWEN_PREDICTING),
    "Qwen3.5-0.8B": Published(
        "qwen3_5_text",
        "752393024",
        _qwen3_5(
            "dense",
            24,
            hidden_size=1024,
            intermediate_size=3584,
            linear_num_value_heads=16,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        QWEN3_5_EXTRA,
    ),
    "Qwen3.5-27B": Published(
        "qwen3_5_text",
        "26895998464",
        _qwen3_5(
            "dense",
            64,
            hidden_size=5120,
            intermediate_size=17408,
            linear_num_value_heads=48,
            num_attention_heads=24,
            num_key_value_heads=4,
        ),
        QWEN3_5_EXTRA,
    ),
    "Qwen3.5-35B-A3B": Published(
        "qwen3_5_moe_text",
        "34660610688",
        _qwen3_5(
            "moe",
            40,
            hidden_size=2048,
            moe_intermediate_size=512,
            num_attention_heads=16,
            num_experts=256,
            num_experts_per_tok=8,
            num_key_value_heads=2,
            shared_expert_intermediate_size=512,
        ),
        QWEN3_5_EXTRA,
    ),
    "Qwen2.5-VL-7B-Instruct": Published("qwen2_5_vl_text", "7615616512", QWEN_2_5_VL_7B, QWEN_2_5_VL_TOWER),
    "Qwen3-VL-8B-Instruct": Published(
        "qwen3_vl_text",
        "8190735360",
        _qwen3_vl("qwen3_vl", "Qwen3VLForConditionalGeneration", _qwen3(4096, 12288, 36, 32, 8)),
        QWEN3_VL_TOWER,
    ),
    "Qwen3-VL-30B-A3B-Instruct": Published(
        "qwen3_vl_moe_text",
        "30532122624",
        _qwen3_vl("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", QWEN3_30B_A3B),
        QWEN3_VL_TOWER,
    ),
}
