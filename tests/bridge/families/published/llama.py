"""Models of Meta's and Mistral's architectures."""

from tests.bridge.families.published.model import LLAMA3, Published


def _llama(hidden, inner, layers, heads, groups, vocab, **changes):
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
        **changes,
    }


def _mistral(**changes):
    return {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        **changes,
    }


PIXTRAL = {
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "image_size": 1540,
    "intermediate_size": 4096,
    "model_type": "pixtral",
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "rope_theta": 10000.0,
}
PIXTRAL_TENSORS = ("vision_tower.patch_conv.weight", "multi_modal_projector.patch_merger.merging_layer.weight")


LLAVA_1_5_7B = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
CLIP_TENSORS = ("vision_tower.vision_model.encoder.layers.23.mlp.fc1.bias", "multi_modal_projector.linear_1.bias")


def _mistral3(text, **changes):
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": PIXTRAL,
        "vision_feature_layer": -1,
        **changes,
    }


MISTRAL_SMALL = _mistral(
    head_dim=128,
    hidden_size=5120,
    intermediate_size=32768,
    max_position_embeddings=131072,
    num_hidden_layers=40,
    rope_theta=1000000000.0,
    vocab_size=131072,
)
MINISTRAL_3B = _mistral(
    head_dim=128,
    hidden_size=3072,
    intermediate_size=9216,
    max_position_embeddings=262144,
    model_type="ministral3",
    num_hidden_layers=26,
    rope_parameters={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
    },
    rope_theta=1000000.0,
    tie_word_embeddings=True,
    vocab_size=131072,
)


def _llama4(**changes):
    text = {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0},
        "rope_theta": 500000.0,
        "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "vocab_size": 202048,
        **changes,
    }
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "attention_dropout": 0.0,
            "hidden_act": "gelu",
            "hidden_size": 1408,
            "image_size": 336,
            "intermediate_size": 5632,
            "model_type": "llama4_vision_model",
            "multi_modal_projector_bias": False,
            "norm_eps": 1e-05,
            "num_attention_heads": 16,
            "num_channels": 3,
            "num_hidden_layers": 34,
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "projector_dropout": 0.0,
            "projector_input_dim": 4096,
            "projector_output_dim": 4096,
            "rope_theta": 10000,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 4096,
        },
    }


LLAMA4_VISION = (
    "multi_modal_projector.linear_1.weight",
    "vision_model.class_embedding",
    "vision_model.layernorm_pre.bias",
    "vision_model.model.layers.0.self_attn.q_proj.bias",
    "vision_model.patch_embedding.linear.weight",
    "vision_model.positional_embedding_vlm",
    "vision_model.vision_adapter.mlp.fc1.weight",
)
LLAMA_3_1 = _llama(4096, 14336, 32, 32, 8, 128256, rope_scaling=LLAMA3)

MODELS = {
    "Llama-3.1-8B": Published("llama", "8030261248", LLAMA_3_1),
    "DeepSeek-R1-Distill-Llama-8B": Published("llama", "8030261248", LLAMA_3_1),
    "Llama-3.2-1B": Published(
        "llama",
        "1235814400",
        _llama(
            2048,
            8192,
            16,
            32,
            8,
            128256,
            head_dim=64,
            rope_scaling=LLAMA3 | {"factor": 32.0},
            tie_word_embeddings=True,
        ),
    ),
    "Llama-2-7b": Published(
        "llama",
        "6738415616",
        _llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096, rope_theta=10000.0),
        tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(32)),
    ),
    "SmolLM2-135M": Published(
        "llama",
        "134515008",
        _llama(
            576,
            1536,
            30,
            9,
            3,
            49152,
            is_llama_config=True,
            max_position_embeddings=8192,
            rope_interleaved=False,
            rope_theta=100000,
            tie_word_embeddings=True,
        ),
    ),
    "TinyLlama-1.1B-Chat-v1.0": Published(
        "llama",
        "1100048384",
        _llama(2048, 5632, 22, 32, 4, 32000, max_position_embeddings=2048, rope_theta=10000.0),
    ),
    "Mistral-7B-v0.1": Published("mistral", "7241732096", _mistral(sliding_window=4096)),
    "Mistral-7B-v0.3": Published("mistral", "7248023552", _mistral(rope_theta=1000000.0, vocab_size=32768)),
    "Mistral-Nemo-Base-2407": Published(
        "mistral",
        "12247782400",
        _mistral(
            head_dim=128,
            hidden_size=5120,
            max_position_embeddings=128000,
            num_hidden_layers=40,
            rope_theta=1000000.0,
            vocab_size=131072,
        ),
    ),
    "Mistral-Small-3.1-24B-Instruct-2503": Published(
        "mistral", "23572403200", _mistral3(MISTRAL_SMALL, tie_word_embeddings=False), PIXTRAL_TENSORS
    ),
    "llava-1.5-7b-hf": Published("llama", "6738939904", LLAVA_1_5_7B, CLIP_TENSORS),
    "Ministral-3-3B-Base-2512": Published("ministral3", "3429006336", _mistral3(MINISTRAL_3B), PIXTRAL_TENSORS),
    "Mixtral-8x7B-v0.1": Published(
        "mixtral",
        "46702792704",
        _mistral(
            architectures=["MixtralForCausalLM"],
            model_type="mixtral",
            num_experts_per_tok=2,
            num_local_experts=8,
            output_router_logits=False,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.02,
        ),
    ),
    "Llama-4-Scout-17B-16E-Instruct": Published("llama4_text", "107769861120", _llama4(), LLAMA4_VISION),
    "Llama-4-Scout-17B-16E": Published(
        "llama4_text",
        "107769861120",
        _llama4(attn_temperature_tuning=4, max_position_embeddings=262144, rope_scaling=LLAMA3),
        LLAMA4_VISION,
    ),
    "Llama-4-Maverick-17B-128E": Published(
        "llama4_text",
        "400711848960",
        _llama4(
            interleave_moe_layer_step=2,
            max_position_embeddings=1048576,
            moe_layers=list(range(1, 48, 2)),
            num_local_experts=128,
            rope_scaling=None,
            use_qk_norm=False,
        ),
        LLAMA4_VISION,
    ),
}
