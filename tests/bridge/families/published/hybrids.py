"""Granite 4."""

from typing import Any

from tests.bridge.families.published.model import Published


def _granite(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "embedding_multiplier": 12,
        "hidden_act": "silu",
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 40,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
        **changes,
    }


MODELS = {
    "granite-4.0-h-tiny": Published(
        "granitemoehybrid",
        "6939037248",
        _granite(
            attention_multiplier=0.0078125,
            hidden_size=1536,
            intermediate_size=512,
            logits_scaling=6,
            mamba_n_heads=48,
            num_attention_heads=12,
            num_experts_per_tok=6,
            num_key_value_heads=4,
            num_local_experts=64,
            shared_intermediate_size=1024,
        ),
    ),
    "granite-4.0-h-small": Published(
        "granitemoehybrid",
        "32.2",
        _granite(
            attention_multiplier=0.0078125,
            hidden_size=4096,
            intermediate_size=768,
            logits_scaling=16,
            mamba_n_heads=128,
            num_attention_heads=32,
            num_experts_per_tok=10,
            num_key_value_heads=8,
            num_local_experts=72,
            shared_intermediate_size=1536,
        ),
    ),
    "granite-4.0-h-micro": Published(
        "granitemoehybrid",
        "3.19",
        _granite(
            attention_multiplier=0.015625,
            hidden_size=2048,
            intermediate_size=8192,
            logits_scaling=8,
            mamba_n_heads=64,
            num_attention_heads=32,
            num_experts_per_tok=0,
            num_key_value_heads=8,
            num_local_experts=0,
            shared_intermediate_size=8192,
        ),
    ),
    "granite-4.0-micro": Published(
        "granitemoehybrid",
        "3.40",
        _granite(
            attention_multiplier=0.015625,
            hidden_size=2560,
            intermediate_size=8192,
            layer_types=["attention"] * 40,
            logits_scaling=10,
            mamba_n_heads=128,
            mamba_d_head=40,
            num_attention_heads=40,
            num_experts_per_tok=0,
            num_key_value_heads=8,
            num_local_experts=0,
            position_embedding_type="rope",
            rope_theta=10000000,
            shared_intermediate_size=8192,
        ),
    ),
}
