"""End-of-sequence tokens of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from ...bridge.families.config_file import lift_config


def eos_token_ids(folder: str | Path, tokenizer: Any) -> set[int]:
    """Return the ids in generation_config.json and of the tokenizer, else those in config.json."""
    ids = _eos_in_config(Path(folder) / "generation_config.json")
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return ids or _eos_in_config(Path(folder) / "config.json")


def _eos_in_config(file: Path) -> set[int]:
    config = lift_config(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    ids = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    return set(ids) if isinstance(ids, list) else {ids} - {None}
