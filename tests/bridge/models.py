"""The tiny checkpoints of the bridge's tests: the families, and the settings that change what a family builds."""

from pathlib import Path
from typing import Any

from tests import tiny

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, tied": ("qwen2", {}),
    "qwen3, one KV head": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": False}),
    "llama, tied": ("llama", {"head_dim": 10}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
}


def save(root: Path, name: str) -> Path:
    """Write one of MODELS in several shards, with the small files that a model folder has, and return its folder."""
    family, changes = MODELS[name]
    folder = root / name
    tiny.model(family, **changes).save_pretrained(folder, max_shard_size="200kB")
    (folder / "tokenizer.json").write_text('{"model": "é"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "args.json").write_text("{}")  # of the run that wrote the folder: stays behind
    return folder
