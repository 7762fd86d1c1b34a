"""Tiny checkpoints of transformers' own classes: sizes that differ from each other, every tensor random."""

import json
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 28,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]},
    ),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
}


def make(name: str, folder: Path, **changes: Any) -> Path:
    """Save the model of that name in fp32, in shards of 100 kB, as transformers writes it."""
    import transformers

    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1 if "norm" in parameter_name else noise)
    model.save_pretrained(folder, max_shard_size="100kB")
    (folder / "tokenizer.json").write_text('{"model": "é"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
