"""What ends a completion."""

import json
from pathlib import Path
from typing import Any


def end_tokens(folder: str | Path, tokenizer: Any) -> set[int]:
    """The tokens of a model's folder that do: generation_config.json's and the tokenizer's, or else config.json's."""
    ends = _stated(Path(folder) / "generation_config.json")
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return ends or _stated(Path(folder) / "config.json")


def _stated(file: Path) -> set[int]:
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    stated = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
    return set(stated) if isinstance(stated, list) else {stated} - {None}
