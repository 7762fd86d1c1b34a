"""Hunyuan, Cohere, earlier Gemma, and families of one or two models each."""

from tests.bridge.families.published.model import Published


def _hunyuan(alpha, **changes):
    return {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.1,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "model_type": "hunyuan_v1_dense",
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "alpha": alpha,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cla": False,
        "use_qk_norm": True,
        **changes,
    }


HUNYUAN_A13B = _hunyuan(
    1000.0,
    architectures=["HunYuanMoEV1ForCausalLM"],
    hidden_size=4096,
    intermediate_size=3072,
    model_type="hunyuan_v1_moe",
    moe_intermediate_size=[3072] * 32,
    moe_topk=[8] * 32,
    num_attention_heads=32,
    num_experts=64,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_shared_expert=[1] * 32,
    vocab_size=128167,
)


def _cohere(model_type="cohere", **changes):
    return {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "model_type": model_type,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 10000,
        "torch_dtype": "bfloat16",
        "use_qk_norm": False,
        "vocab_size": 256000,
        **changes,
    }


def _cohere2(**changes):
    return _cohere(
        "cohere2",
        head_dim=128,
        layer_switch=4,
        logit_scale=0.25,
        max_position_embeddings=132096,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rope_scaling=None,
        rope_theta=50000,
        rotary_pct=1.0,
        sliding_window=4096,
        sliding_window_pattern=4,
        use_embedding_sharing=True,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=True,
        **changes,
    )


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

APERTUS_8B = {
    "architectures": ["ApertusForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "xielu",
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "apertus",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "post_norm": False,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
        "type": "llama3",
    },
    "rope_theta": 12000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}


def _starcoder2(hidden, layers, heads, groups, **changes):
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "attention_dropout": 0.1,
        "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 16384,
        "mlp_type": "default",
        "model_type": "starcoder2",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "residual_dropout": 0.1,
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "use_bias": True,
        "vocab_size": 49152,
        **changes,
    }


def _granitemoe(hidden, layers, heads, experts):
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.1,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 131072,
        "model_type": "granitemoe",
        "num_attention_heads": heads,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "output_router_logits": False,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1500000.0,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49155,
    }


MINITRON_4B = {
    "architectures": ["NemotronForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "relu2",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "nemotron",
    "norm_eps": 1e-05,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GLM_4_9B_CHAT = {
    "architectures": ["GlmForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 131072,
    "model_type": "glm",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}

MODELS = {
    "starcoder2-3b": Published("starcoder2", "3030371328", _starcoder2(3072, 30, 24, 2, rope_theta=999999.4420358813)),
    "starcoder2-7b": Published("starcoder2", "7173923840", _starcoder2(4608, 32, 36, 4)),
    "starcoder2-15b": Published(
        "starcoder2", "15957889024", _starcoder2(6144, 40, 48, 4, rope_theta=100000, tie_word_embeddings=False)
    ),
    "granite-3.1-1b-a400m-instruct": Published("granitemoe", "1.33", _granitemoe(1024, 24, 16, 32)),
    "granite-3.1-3b-a800m-instruct": Published("granitemoe", "3.30", _granitemoe(1536, 32, 24, 40)),
    "Minitron-4B-Base": Published("nemotron", "4.19", MINITRON_4B),
    "glm-4-9b-chat-hf": Published("glm", "9399951360", GLM_4_9B_CHAT),
    "Apertus-8B-Instruct-2509": Published("apertus", "8.05", APERTUS_8B),
    "Apertus-70B-Instruct-2509": Published(
        "apertus",
        "70.6",
        APERTUS_8B
        | {
            "hidden_size": 8192,
            "intermediate_size": 43008,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
        },
    ),
    "gemma-2b": Published("gemma", "2506172416", _gemma(2048, 16384, 18, 8, 1)),
    "gemma-7b": Published("gemma", "8537680896", _gemma(3072, 24576, 28, 16, 16)),
    "gemma-2-2b-it": Published("gemma2", "2614341888", _gemma(2304, 9216, 26, 8, 4, **GEMMA2)),
    "gemma-2-9b-it": Published("gemma2", "9241705984", _gemma(3584, 14336, 42, 16, 8, **GEMMA2)),
    "gemma-2-27b-it": Published(
        "gemma2",
        "27227128320",
        _gemma(4608, 36864, 46, 32, 16, **GEMMA2 | {"head_dim": 128, "query_pre_attn_scalar": 144}),
    ),
    "aya-23-8B": Published("cohere", "8028033024", _cohere()),
    "c4ai-command-r-v01": Published(
        "cohere",
        "34980831232",
        _cohere(
            hidden_size=8192,
            intermediate_size=22528,
            max_position_embeddings=131072,
            num_attention_heads=64,
            num_hidden_layers=40,
            num_key_value_heads=64,
            rope_theta=8000000.0,
        ),
    ),
    "c4ai-command-r7b-12-2024": Published("cohere2", "8028033024", _cohere2()),
    "c4ai-command-a-03-2025": Published(
        "cohere2",
        "111057580032",
        _cohere2()
        | {
            "hidden_size": 12288,
            "intermediate_size": 36864,
            "num_attention_heads": 96,
            "num_hidden_layers": 64,
        },
    ),
    "Hunyuan-1.8B-Instruct": Published(
        "hunyuan_v1_dense",
        "1.79",
        _hunyuan(
            1000.0,
            hidden_size=2048,
            intermediate_size=6144,
            num_attention_heads=16,
            num_hidden_layers=32,
            num_key_value_heads=4,
            vocab_size=120818,
        ),
    ),
    "Hunyuan-7B-Instruct": Published(
        "hunyuan_v1_dense",
        "7.50",
        _hunyuan(
            1000.0,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            vocab_size=128167,
        ),
    ),
    "Hunyuan-A13B-Instruct": Published("hunyuan_v1_moe", "80.4", HUNYUAN_A13B),
}
