"""config.json of published Omni models, without what has no part in the thinker's architecture."""

QWEN3_OMNI_30B_A3B = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "audio_config": {
            "activation_function": "gelu", "d_model": 1280, "downsample_hidden_size": 480,
            "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layers": 32, "n_window": 50,
            "n_window_infer": 800, "num_mel_bins": 128, "output_dim": 2048,
        },
        "text_config": {
            "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 768, "max_position_embeddings": 65536, "mlp_only_layers": [],
            "model_type": "qwen3_omni_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
            "rope_scaling": {"interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 1000000, "vocab_size": 152064,
        },
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304, "num_heads": 16,
            "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
}  # fmt: skip
QWEN2_5_OMNI_7B = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        "audio_config": {
            "activation_function": "gelu", "d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
            "encoder_layers": 32, "model_type": "qwen2_5_omni_audio_encoder", "n_window": 100, "num_mel_bins": 128,
            "output_dim": 3584,
        },
        "text_config": {
            "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
            "max_window_layers": 28, "model_type": "qwen2_5_omni_text", "num_attention_heads": 28,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False, "vocab_size": 152064,
        },
        "vision_config": {
            "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", "hidden_size": 1280,
            "in_channels": 3, "intermediate_size": 3420, "model_type": "qwen2_5_omni_vision_encoder", "num_heads": 16,
            "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "window_size": 112,
        },
    },
}  # fmt: skip
