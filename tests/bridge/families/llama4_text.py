"""Llama 4 text: chunks that documents cross, layers without positions whose queries grow, experts in every other.

Alone, or within a checkpoint whose model also sees.
"""

from dataclasses import replace

from tests.bridge.families import MOE, SHARED, Tensors, Tiny
from tests.bridge.families.faults import Fault, changed
from tests.bridge.families.gemma3_text import whole


def config(**changes):
    from transformers import Llama4TextConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    settings = {
        "head_dim": 16,
        "intermediate_size": 40,
        "intermediate_size_mlp": 80,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 13,
        "floor_scale": 7,
        "attn_scale": 0.6,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }
    return Llama4TextConfig(**SHARED | settings | changes)


def unseen(config, noise) -> Tensors:
    """Some of the vision tower, which is carried along."""
    return {
        "vision_model.layernorm_post.bias": noise(16),
        "multi_modal_projector.linear_1.weight": noise(config.hidden_size, 16),
    }


def nested(text):
    """config.json of a vision-language model, as the hub has it."""
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {key: value for key, value in text.items() if key not in ("architectures", "layer_types")}
        | {"no_rope_layers": []},
        "vision_config": {"num_hidden_layers": 1},
    }


FAULTS = {
    "growth of queries": changed(query_growth=None),
    "norm of turned queries": changed(qk_norm="head"),
    "experts' outputs weighted": Fault(
        architecture=lambda about: replace(about, transformer=about.transformer | {"moe_apply_probs_on_input": False})
    ),
}
TINY = {
    "": Tiny(config, layouts=MOE, faults=FAULTS),
    "within": Tiny(config, (), files=whole, raw=nested, extra=unseen),
}
