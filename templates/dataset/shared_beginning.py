"""Beginning that the documents of a sample have in common, as the prompt of a pair, and may share in a row."""

from collections.abc import Sequence

import numpy as np

from .placed_media import Document

MIN_SAVING = 0.05  # share of all tokens below which nothing is shared


def shared_beginning(documents: Sequence[Document]) -> int:
    """Return the number of tokens at the start of the documents that a row may hold once; 0 if that saves too little.

    These have the same loss weights in all documents. The token after them begins the rest of each document, where it
    is not predicted, so it has no loss.
    """
    (first_ids, first_weights), *others = documents
    length = min(len(ids) for ids, _ in documents)
    is_free = first_weights[:length] == 0
    is_equal = np.ones(length, bool)
    for ids, weights in others:
        is_equal &= (ids[:length] == first_ids[:length]) & (weights[:length] == first_weights[:length])
        is_free &= weights[:length] == 0
    common = length if is_equal.all() else int(is_equal.argmin())
    ends = np.flatnonzero(is_free[: common + 1])
    shared = int(ends[-1]) if len(ends) else 0
    saved = shared * len(others)
    return shared if saved and saved >= MIN_SAVING * sum(len(ids) for ids, _ in documents) else 0
