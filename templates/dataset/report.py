"""Report on the training data: rows, tokens, packs, and the first sample."""

from collections.abc import Sequence

import numpy as np

from ..formats.schemas import POOLED, PROMPTED, UNGROUPED, Stage
from ..plural import plural
from ..tokenizer import Tokenizer
from .dropped_rows import DroppedRows
from .packing import Packs
from .placed_media import Document
from .store import TokenStore

OPEN, CLOSE = "⟦", "⟧"  # around trained tokens
SHOWN = 4000  # most characters of a document in the report
# The cache keeps these refusals.
MEDIA_REASONS = ("an image", "a video", "an audio", "a URL of its media", "the host of a URL")
NAMES: dict[Stage, tuple[str, ...]] = {  # names of a sample's documents; the last one repeats
    "preference": ("chosen", "rejected"),
    "kto": ("answer", "answer to another prompt"),
    "seq_cls": ("text",),
    "embedding": ("anchor", "positive", "negative"),
    "reranker": ("first document", "negative"),
    "prompts": ("prompt",),
    "answered": ("prompt", "with its answer"),
    "asked": ("prompt", "with its answer"),
}


def describe_source(name: str, rows: int, documents: int, dropped: DroppedRows) -> str:
    line = f"  {name}: {plural(rows, 'row')}, {plural(documents, 'sample')}"
    if not dropped.counts:
        return line
    is_media = any(reason.startswith(MEDIA_REASONS) for reason in dropped.counts)
    note = "\n  After a repair of media, set --load_from_cache_file false." if is_media else ""
    return f"{line}; rows dropped:\n{dropped}{note}"


def describe_store(store: TokenStore) -> str:
    tokens = int(store.lengths.sum())
    share = f"{store.trained_tokens / tokens:.1%} trained on"
    if store.stage not in UNGROUPED:
        share = f"in {plural(int(store.document_counts.sum()), 'document')}"
    if store.has_media:
        counts = " and ".join(plural(count, kind) for kind, count in store.media_counts().items() if count)
        share += f", {counts} of {plural(int(store.visual_tokens.sum()), 'token')}"
    shortest, longest = int(store.lengths.min()), int(store.lengths.max())
    lengths = plural(longest, "token")
    if shortest != longest:
        lengths = f"{shortest:,} to {lengths}, {tokens / len(store):,.0f} on average"
    return f"  together {plural(len(store), 'sample')} of {lengths}: {plural(tokens, 'token')}, {share}"


def describe_packs(packs: Packs, lengths: np.ndarray, capacity: int) -> str:
    fill = lengths.sum() / (len(packs) * capacity)
    rows = f"{plural(len(packs), 'pack')} of {plural(capacity, 'token')}"
    return f"  packed into {rows}, {fill:.2%} full: {1 - fill:.2%} is padding"


def describe_sample(
    documents: list[Document],
    label: np.ndarray,
    stage: Stage,
    tokenizer: Tokenizer,
    placeholders: Sequence[int] = (),
) -> str:
    """Return the first sample as text, document by document.

    placeholders: tokens of images and videos, of which runs are abridged
    """
    marks = [stage not in POOLED and (stage not in PROMPTED or number > 0) for number in range(len(documents))]
    brackets = f" ({OPEN}{CLOSE}: trained on)" if any(marks) else ""
    label_text = f", label {' '.join(f'{number:g}' for number in label)}" if len(label) else ""
    texts = [
        _text(document, tokenizer, placeholders, mark=mark) for document, mark in zip(documents, marks, strict=True)
    ]
    if stage not in UNGROUPED:
        names = NAMES[stage]
        texts = [f"--- {names[min(i, len(names) - 1)]}\n{text}" for i, text in enumerate(texts)]
    return "\n".join([f"The first sample{label_text}{brackets}:", *texts])


def _text(document: Document, tokenizer: Tokenizer, placeholders: Sequence[int], *, mark: bool) -> str:
    """Return a document with brackets around its trained tokens, shortened in the middle if it is long."""
    ids, weights = document
    is_visual = np.isin(ids, placeholders)
    edges = np.flatnonzero(np.diff(weights > 0) | np.diff(is_visual)) + 1
    parts = []
    for run in np.split(np.arange(len(ids)), edges):
        if is_visual[run[0]]:
            parts.append(f"{tokenizer.decode([int(ids[run[0]])])}x{len(run):,}")
            continue
        text = tokenizer.decode(ids[run].tolist())
        parts.append(f"{OPEN}{text}{CLOSE}" if mark and weights[run[0]] > 0 else text)
    text = "".join(parts)
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}\n... {len(text) - SHOWN:,} characters ...\n{text[-SHOWN // 2 :]}"
    return text
