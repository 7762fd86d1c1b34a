"""Statistics of the training data, for JSON: sources, tokens, and the lengths of samples."""

import numpy as np

from ..formats.schemas import UNGROUPED
from ..json_types import JsonObject
from .dropped_rows import DroppedRows
from .store import TokenStore

BARS = 50  # most bars of a histogram
QUANTILES = {"5 %": 0.05, "median": 0.5, "95 %": 0.95, "99 %": 0.99}


def source_statistics(name: str, rows: int, samples: int, dropped: DroppedRows) -> JsonObject:
    """Return a source's rows, samples and dropped rows by reason."""
    reasons = [
        {"reason": reason, "rows": count, "places": dropped.places[reason]} for reason, count in dropped.counts.items()
    ]
    return {"name": name, "rows": rows, "samples": samples, "dropped": reasons}


def store_statistics(store: TokenStore) -> JsonObject:
    """Return the numbers of samples, tokens and media, and the histogram of lengths."""
    statistics: JsonObject = {"samples": len(store), "tokens": int(store.lengths.sum())}
    if store.stage in UNGROUPED:
        statistics["trained_tokens"] = store.trained_tokens
    else:
        statistics["documents"] = int(store.document_counts.sum())
    if store.has_media:
        statistics |= {"media": store.media_counts(), "visual_tokens": int(store.visual_tokens.sum())}
    return statistics | {"lengths": histogram(store.lengths)}


def histogram(lengths: np.ndarray) -> JsonObject:
    """Return {"width", "start", "counts", "quantiles"}: bar i counts [start + i * width, start + (i + 1) * width).

    lengths: int64 [samples], not empty. The width is 1, 2 or 5 times a power of ten.
    """
    low, high = int(lengths.min()), int(lengths.max())
    widths = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    width = next(width for width in widths if high // width - low // width < BARS)
    start = low // width * width
    counts = np.bincount((lengths - start) // width)
    quantiles = np.quantile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    numbers = dict(zip(QUANTILES, quantiles.tolist(), strict=True))
    return {
        "width": width,
        "start": start,
        "counts": counts.tolist(),
        "quantiles": {"least": low, **numbers, "mean": float(lengths.mean()), "greatest": high},
    }
