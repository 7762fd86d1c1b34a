"""Descriptions of a micro batch's packed documents, made on the CPU once for all layers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from .rope import RotaryRule, RotaryTables, make_rotary_tables


class AttentionSpan(NamedTuple):
    """Range of keys that a layer's queries attend to: `window` and `chunk` of Layer."""

    window: int | None = None
    chunk: int | None = None


FULL_SPAN = AttentionSpan()


@dataclass(frozen=True)
class Segments:
    """Consecutive pieces of the local queries, each with its range of keys.

    The last query and the last key of a segment are the same token. Without context parallelism a segment is a
    document, or one chunk of it if the layer attends by chunks. With context parallelism a rank holds two parts of each
    document. A part attends to the keys from the start of the document, window or chunk to the part's end; `key_index`
    selects them from the gathered keys. Likewise a document with a prefix attends to the prefix's keys and its own.

    With blocks that attend in both directions, a segment is a block, or the text between two of them. `keys_ahead` has
    for each segment the number of its keys behind its last query; None: it is causal.
    """

    queries: list[int]  # length of each segment's queries
    keys: list[int]  # length of each segment's keys
    query_ends: Tensor  # [segments + 1] int32, on the device
    key_ends: Tensor
    # [sum(keys)]: positions in the keys, rank-major gathered under context parallelism; None: the keys as they are
    key_index: Tensor | None
    window: int | None = None  # also None if no document is longer than the window
    chunked: bool = False  # whether a document was split into chunks
    keys_ahead: list[int | None] | None = None  # None: all segments are causal
    tile_cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cache of `tiles`
    copies_cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cache of `key_copies`

    def tiles(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the tiles of `size` queries and of `size` keys; see kernels/attention.py for the format."""
        if size not in self.tile_cache:
            queries, keys = _make_tiles(self, size)
            device = self.query_ends.device
            self.tile_cache[size] = to_device(queries, device), to_device(keys, device)
        return self.tile_cache[size]

    def key_copies(self, total: int) -> tuple[Tensor, Tensor]:
        """Return the positions in `key_index` by the gathered token there, [sum(keys)], and where each token's begin.

        total: gathered tokens. The second is [total + 1].
        """
        assert self.key_index is not None
        if total not in self.copies_cache:
            tokens, order = self.key_index.sort(stable=True)
            self.copies_cache[total] = order, torch.searchsorted(tokens, torch.arange(total + 1, device=tokens.device))
        return self.copies_cache[total]


def make_segments(
    bounds: list[int],
    cp_rank: int,
    cp_size: int,
    device: torch.device,
    span: AttentionSpan = FULL_SPAN,
    prefixes: Sequence[int] = (),
    blocks: Sequence[tuple[int, int]] = (),
) -> Segments:
    """Return this rank's segments.

    bounds [documents + 1]: boundaries of the documents in the full sequence, each divisible by 2 x cp_size.
    prefixes [documents]: document whose tokens precede those of each, -1: none; empty: no document has one, as under
        context parallelism
    blocks: first and last + 1 position in the full sequence of tokens that attend to each other in both directions
    """
    assert not (prefixes and cp_size > 1)
    ranges = list(pairwise(bounds))
    prefix_ranges = [ranges[number] if number >= 0 else (0, 0) for number in prefixes] or [(0, 0)] * len(ranges)
    longest = max(
        end - start + after - before for (start, end), (before, after) in zip(ranges, prefix_ranges, strict=True)
    )
    window, chunk = (limit if limit and limit < longest else None for limit in span)
    assert not (blocks and chunk)
    queries, keys, key_positions, keys_ahead = [], [], [], []
    for (start, end), prefix in zip(ranges, prefix_ranges, strict=True):
        document_index = gathered_positions(start, end - start, bounds[-1], cp_size) if cp_size > 1 else None
        if prefixes or (blocks and cp_size == 1):
            document_index = torch.cat((torch.arange(*prefix), torch.arange(start, end)))
        begin = prefix[1] - prefix[0]
        document_blocks = [(begin + low - start, begin + high - start) for low, high in blocks if start <= low < end]
        for first, last in _local_parts(end - start, cp_rank, cp_size):
            for low, high, key_end in _pieces(begin + first, begin + last, chunk, document_blocks):
                first_key = low // chunk * chunk if chunk else 0  # the first key that the first query attends to
                if window:
                    first_key = max(first_key, low - window + 1)
                queries.append(high - low)
                keys.append((key_end or high) - first_key)
                keys_ahead.append(None if key_end is None else key_end - high)
                if document_index is not None:
                    key_positions.append(document_index[first_key : key_end or high])
    key_index = to_device(torch.cat(key_positions), device) if key_positions else None
    query_ends = _cu_seqlens(queries, device)
    key_ends = query_ends if keys == queries else _cu_seqlens(keys, device)
    ahead = keys_ahead if blocks else None
    return Segments(queries, keys, query_ends, key_ends, key_index, window, chunk is not None, ahead)


def _make_tiles(segments: Segments, size: int) -> tuple[Tensor, Tensor]:
    """Return the tiles of queries and of keys, [n, 5] each, those with the most work first."""
    queries, keys = torch.tensor(segments.queries), torch.tensor(segments.keys)
    key_offset = keys - queries
    descriptions = torch.stack((queries.cumsum(0) - queries, queries, keys.cumsum(0) - keys, keys), dim=1)

    def list_tiles(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the segment and the first position of each tile, and the tiles."""
        counts = (lengths + size - 1) // size
        segment = torch.arange(len(lengths)).repeat_interleave(counts)
        first = (torch.arange(len(segment)) - (counts.cumsum(0) - counts)[segment]) * size
        return segment, first, torch.cat((descriptions[segment], first.unsqueeze(1)), dim=1).to(torch.int32)

    max_keys = segments.window or max(segments.keys)
    segment, first, tiles = list_tiles(queries)
    score_counts = (torch.minimum(first + size, queries[segment]) + key_offset[segment]).clamp(max=max_keys + size)
    query_tiles = tiles[score_counts.argsort(descending=True, stable=True)]
    segment, first, tiles = list_tiles(keys)
    score_counts = (queries[segment] - (first - key_offset[segment]).clamp(min=0)).clamp(max=max_keys + size)
    return query_tiles, tiles[score_counts.argsort(descending=True, stable=True)]


def _local_parts(length: int, cp_rank: int, cp_size: int) -> list[tuple[int, int]]:
    """Return the ranges of a document's positions that a context-parallel rank holds, in the rank's order."""
    if cp_size == 1:
        return [(0, length)]
    part = length // (2 * cp_size)
    return [(number * part, (number + 1) * part) for number in (cp_rank, 2 * cp_size - 1 - cp_rank)]


def _split_at_chunks(first: int, last: int, chunk: int | None) -> Iterator[tuple[int, int]]:
    """Yield the positions first..last of a document in ranges that do not cross chunk boundaries."""
    while chunk and first // chunk < (last - 1) // chunk:
        end = (first // chunk + 1) * chunk
        yield first, end
        first = end
    yield first, last


def _pieces(
    first: int, last: int, chunk: int | None, blocks: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int | None]]:
    """Yield the positions first..last of a document in ranges of a chunk, of a block or between blocks.

    With each range comes the end of its block; None: it is of no block.
    """
    if not blocks:
        yield from ((low, high, None) for low, high in _split_at_chunks(first, last, chunk))
        return
    for low, high in sorted(blocks):
        begin, end = max(low, first), min(high, last)
        if begin < end:
            if first < begin:
                yield first, begin, None
            yield begin, end, high
            first = end
    if first < last:
        yield first, last, None


def gathered_positions(start: int, length: int, total: int, cp_size: int) -> Tensor:
    """Return the index of each position of a document in the rank-major gathered tokens: [length]."""
    part = length // (2 * cp_size)
    indices = []
    for number in range(2 * cp_size):
        rank, part_index = (number, 0) if number < cp_size else (2 * cp_size - 1 - number, 1)
        begin = rank * (total // cp_size) + start // cp_size + part_index * part
        indices.append(torch.arange(begin, begin + part))
    return torch.cat(indices)


def next_positions(bounds: list[int], cp_rank: int, cp_size: int, device: torch.device) -> Tensor:
    """Return the index of each position's successor in the rank-major gathered tokens: [local sequence].

    It is -1 at a document's last position. bounds: as in `make_segments`.
    """
    positions = []
    for start, end in pairwise(bounds):
        indices = (
            gathered_positions(start, end - start, bounds[-1], cp_size) if cp_size > 1 else torch.arange(start, end)
        )
        next_indices = torch.cat((indices[1:], torch.tensor([-1])))
        positions += [next_indices[first:last] for first, last in _local_parts(end - start, cp_rank, cp_size)]
    return to_device(torch.cat(positions), device)


def _cu_seqlens(lengths: list[int], device: torch.device) -> Tensor:
    return to_device(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, copied without waiting for the device if it is on another one."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass
class Documents(PackedSeqParams):
    """Documents of a micro batch, as every layer needs them."""

    segments: dict[AttentionSpan, Segments] = field(default_factory=dict)  # by the layers' attention spans
    # Instead of `segments`, where blocks of images differ between padded rows: of each row.
    row_segments: tuple[dict[AttentionSpan, Segments], ...] = ()
    rotary: tuple[RotaryTables, ...] = ()  # for each of Architecture.ropes
    positions: Tensor | None = None  # [sequence, batch], within documents
    next_positions: Tensor | None = None  # see `next_positions`; for mtp.py
    token_shares: Tensor | None = None  # [sequence, batch] fp32: 1 / number of the batch's tokens, 0 for padding
    delta_layout: Any = None  # DeltaLayout of delta_rule.py
    selections: dict[int, Tensor] = field(default_factory=dict)  # selected keys by layer: see sparse_attention.py
    # Leaves of keys and values that later layers share, by the number of their layer from 1: see shared_keys.py.
    shared_keys: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    layer_inputs: tuple[Tensor, ...] = ()  # leaf of each layer, [sequence, rows, size]: see layer_inputs.py
    media: Any = None  # MediaFeatures of deepstack.py, on a stage that takes any
    loss_positions: Tensor | None = None  # [n]: positions of batch * sequence whose labels have a loss; None: all


def make_packed_seqs(
    position_ids: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    *,
    ropes: Sequence[RotaryRule],
    spans: Iterable[AttentionSpan],
    dtype: torch.dtype,
    cp_rank: int = 0,
    cp_size: int = 1,
    rope_positions: Tensor | None = None,
    prefixes: Sequence[int] = (),
    blocks: Sequence[tuple[int, int, int]] = (),
    blocks_in_windows: bool = False,
) -> Documents:
    """Return the documents of a micro batch.

    position_ids: [batch, local sequence], on the device
    rope_positions: [axes, batch, local sequence], on the device: positions of time, height and width for the ropes
    cu_seqlens: [documents + 1], on the CPU, boundaries in the full row; None: rows are padded instead of packed
    max_seqlen: length of the longest document
    prefixes: as of `make_segments`. blocks: row, first and last + 1 position in the full row of each, as there
    blocks_in_windows: the other layers do not have the blocks
    """
    device = position_ids.device
    if cu_seqlens is None:
        bounds, packed = [0, position_ids.shape[1] * cp_size], {}
    else:
        bounds, ends = cu_seqlens.tolist(), to_device(cu_seqlens, device)
        packed = {
            "qkv_format": "thd",
            "cu_seqlens_q": ends,
            "cu_seqlens_kv": ends,
            "max_seqlen_q": max_seqlen,
            "max_seqlen_kv": max_seqlen,
        }
        if cp_size > 1:
            packed |= {"cu_seqlens_q_padded": ends, "cu_seqlens_kv_padded": ends}

    def select_long(original_length: int) -> Tensor | bool:
        """Return whether each token's document is longer: one bool for all of them, or [local sequence]."""
        lengths = [end - start for start, end in pairwise(bounds)] if cu_seqlens is not None else [max_seqlen]
        is_long = [length > original_length for length in lengths]
        if all(is_long) or not any(is_long):
            return is_long[0]
        local_lengths = torch.tensor(lengths) // cp_size
        return to_device(torch.tensor(is_long).repeat_interleave(local_lengths), device)

    by_row = [[(low, high) for row, low, high in blocks if row == number] for number in range(len(position_ids))]

    def segments_of(span: AttentionSpan, row_blocks: Sequence[tuple[int, int]]) -> Segments:
        span_blocks = row_blocks if span.window or not blocks_in_windows else ()
        return make_segments(bounds, cp_rank, cp_size, device, span, prefixes, span_blocks)

    unique_spans = set(spans)
    segments = [
        {span: segments_of(span, row_blocks) for span in unique_spans} for row_blocks in (by_row if blocks else [()])
    ]
    return Documents(
        **packed,
        segments=segments[0],
        row_segments=tuple(segments) if len(segments) > 1 else (),
        rotary=tuple(
            make_rotary_tables(position_ids if rope_positions is None else rope_positions, rope, select_long, dtype)
            for rope in ropes
        ),
        positions=position_ids.t(),
    )
