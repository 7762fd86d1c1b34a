"""The text models of vision-language checkpoints: their part of config.json, and the names of their tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..rows import Row


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a config.json, or all of it where that is of a text model alone."""
    if "text_config" not in config:
        return config
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    return outer | config["text_config"]


def inner(row: Row) -> Row:
    """model.layers... is called model.language_model.layers..., and the head as it was: transformers 5 writes it so."""
    return replace(row, hf=row.hf.replace("model.", "model.language_model.", 1))


def outer(row: Row) -> Row:
    """The whole text model with its head is called language_model."""
    return replace(row, hf="language_model." + row.hf)


def spelled(config: dict[str, Any], rows: list[Row], *ways: Callable[[Row], Row]) -> list[Row]:
    """The rows by all the names that they have: those of the text model alone, and in each of `ways`. The more likely
    ones for this config.json come first."""
    within = [way(row) for way in ways for row in rows]
    return within + rows if "text_config" in config else rows + within
