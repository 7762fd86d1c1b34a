"""The text models of vision-language checkpoints: their part of config.json, and the names of their tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import Row


def text_config(config: dict[str, Any], *, tied_inside: bool = False) -> dict[str, Any]:
    """Return the text model's part of a config.json, or all of it if the checkpoint is a text model alone.

    transformers ties the output layer by the outer `tie_word_embeddings` and does not look at the inner one.
    tied_inside: the family's language model is a whole causal model inside, which goes by the inner one instead.
    """
    if "text_config" not in config:
        return config
    text = dict(config["text_config"])
    if not tied_inside:
        text.pop("tie_word_embeddings", None)
    outer = ("quantization_config",) if tied_inside else ("quantization_config", "tie_word_embeddings")
    return {key: config[key] for key in outer if key in config} | text


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
