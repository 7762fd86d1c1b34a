"""Any family's model with a head in the place of its output layer: transformers' ...ForSequenceClassification."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import OUTPUT, REPLICATED, Architecture, Family, Row

SCORED = "ForSequenceClassification"
SCORE = Row("score.weight", OUTPUT.name, REPLICATED)


def head_of(config: dict[str, Any]) -> int | None:
    """How many labels the head of a raw config.json's model has; None: it has an output layer."""
    named = config.get("architectures") or [""]
    if not named[0].endswith(SCORED):
        return None
    return len(config.get("id2label") or ()) or config.get("num_labels") or 2


def scored(family: Family) -> Family:
    """`family`, of models with a head."""

    def describe(config: dict[str, Any]) -> Architecture:
        return replace(family.describe(config), head=head_of(config), tied=False)

    def rows(config: dict[str, Any]) -> list[Row]:
        return [SCORE if row.mcore == OUTPUT.name else row for row in family.rows(config)]

    return replace(family, describe=describe, rows=rows, predicting_rows=None)
