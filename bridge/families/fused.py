"""Checkpoints that hold query, key and value as one matrix, or gate and up."""

from ..rows import Architecture, Kind, Span


def _query_key_value(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """For each query group its query heads, its key head, its value head, of one matrix with all queries first."""
    heads, groups = architecture.transformer["num_attention_heads"], architecture.transformer["num_query_groups"]
    one = length // (heads + 2 * groups)
    sizes = (heads // groups * one, one, one)
    starts = (0, heads * one, (heads + groups) * one)
    return [
        Span(0, start + g * size, start + (g + 1) * size)
        for g in range(groups)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _gate_and_up(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """For each rank its gate, then its up, of one matrix with all of the gate first."""
    size = length // (2 * ranks)
    return [Span(0, start + r * size, start + (r + 1) * size) for r in range(ranks) for start in (0, length // 2)]


FUSED_QKV = Kind(0, _query_key_value)
FUSED_GATE_UP = Kind(0, _gate_and_up)
