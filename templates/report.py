"""What a user should know about the data before training on it."""

import numpy as np

from .layout import Document
from .packing import Packs
from .store import Refusals, TokenStore

OPEN, CLOSE = "⟦", "⟧"  # around what is trained on
SHOWN = 4000  # characters of the first sample


def describe_source(name: str, rows: int, documents: int, refusals: Refusals) -> str:
    line = f"  {name}: {rows:,} rows, {documents:,} samples"
    return f"{line}; rows left out:\n{refusals}" if refusals.counts else line


def describe_store(store: TokenStore) -> str:
    tokens = int(store.lengths.sum())
    return (
        f"  together {len(store):,} samples of {store.lengths.min():,} to {store.lengths.max():,} tokens, "
        f"{tokens / len(store):,.0f} on average: {tokens:,} tokens, {store.trained_tokens / tokens:.1%} trained on"
    )


def describe_packs(packs: Packs, lengths: np.ndarray, capacity: int) -> str:
    full = lengths.sum() / (len(packs) * capacity)
    return f"  packed into {len(packs):,} rows of {capacity:,} tokens, {full:.2%} full: {1 - full:.2%} is padding"


def marked(document: Document, tokenizer) -> str:
    """The document as text, with what is trained on between brackets. Both ends of a long one are shown."""
    ids, weights = document
    edges = np.flatnonzero(np.diff(weights > 0)) + 1
    parts = []
    for run in np.split(np.arange(len(ids)), edges):
        text = tokenizer.decode(ids[run].tolist())
        parts.append(f"{OPEN}{text}{CLOSE}" if weights[run[0]] > 0 else text)
    text = "".join(parts)
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}\n... {len(text) - SHOWN:,} characters ...\n{text[-SHOWN // 2 :]}"
    return f"The first sample ({OPEN}{CLOSE}: what is trained on):\n{text}"
