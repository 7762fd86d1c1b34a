"""The tiny checkpoints of the tests of loading and saving: of many shards, with the small files of a model folder."""

from pathlib import Path

from tests import tiny

MODELS = ("qwen2", "qwen3_moe")


def save(root: Path, name: str) -> Path:
    """Write a family's tiny model, and return its folder."""
    folder = root / name
    tiny.model(name).save_pretrained(folder, max_shard_size="200kB")
    (folder / "tokenizer.json").write_text('{"model": "é"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "checkpoint-3").mkdir()  # a run's: stays behind, for it has weights
    (folder / "checkpoint-3" / "config.json").write_text("{}")
    (folder / "checkpoint-3" / "model.safetensors").write_bytes(b"")
    (folder / "args.json").write_text("{}")  # of the run that wrote the folder: stays behind
    return folder
