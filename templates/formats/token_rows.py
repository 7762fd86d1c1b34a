"""Rows that hold tokens: `input_ids`, and optionally `labels` and `loss_scale`, as ms-swift's cached datasets."""

import numpy as np

from ..json_types import JsonObject
from .schemas import UnusableRow

MASKED = -100  # label of a token that is not trained on


def tokens_of(row: JsonObject, vocabulary_size: int) -> tuple[np.ndarray, list[tuple[int, float]]]:
    """Return token ids, int32 [tokens], and loss weights, run-length encoded.

    A label is the token at its own place. The first token is not predicted, whatever its label.
    """
    ids = _numbers(row, "input_ids", np.int64)
    if not len(ids):
        raise UnusableRow("it is empty")
    if ids.min() < 0 or ids.max() >= vocabulary_size:
        raise UnusableRow("its input_ids hold a token that the tokenizer does not have")
    weights = np.ones(len(ids))
    for name in ("labels", "loss_scale"):
        if row.get(name) is None:
            continue
        values = _numbers(row, name, np.int64 if name == "labels" else np.float64)
        if len(values) != len(ids):
            raise UnusableRow(f"its {name} and input_ids are not equally many")
        if name == "labels" and ((values != ids) & (values != MASKED)).any():
            raise UnusableRow(f"its labels are neither its input_ids nor {MASKED}")
        weights = weights * (values != MASKED if name == "labels" else values)
    if not (weights >= 0).all() or not np.isfinite(weights).all():
        raise UnusableRow("its loss_scale is not at least 0")
    edges = np.flatnonzero(np.diff(weights)) + 1
    starts = [0, *edges.tolist()]
    lengths = np.diff([*starts, len(ids)]).tolist()
    return ids.astype(np.int32), [
        (length, float(weights[start])) for start, length in zip(starts, lengths, strict=True)
    ]


def _numbers(row: JsonObject, column: str, dtype: type) -> np.ndarray:
    try:
        values = np.array(row[column], dtype)
    except (ValueError, OverflowError) as error:
        raise UnusableRow(f"its {column} is not a list of numbers") from error
    if values.ndim != 1:
        raise UnusableRow(f"its {column} is not a list of numbers")
    return values
