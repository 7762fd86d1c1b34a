"""Packed documents of a micro batch, described for attention once, on the CPU, before the first layer runs."""

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
    """The range of a layer's queries within a document: window and chunk of Layer."""

    window: int | None = None
    chunk: int | None = None


FULL_SPAN = AttentionSpan()


@dataclass(frozen=True)
class Segments:
    """Pieces of queries in order, each with the keys that it attends to, the last of which is its own.

    Without context parallelism a segment is a document, or a document's chunk where the layer attends by chunks. With
    context parallelism a rank holds two parts of each document, and a part meets the document from its start (or the
    window's, or the chunk's) to the part's end; `key_index` finds these keys among the gathered ones.
    """

    queries: list[int]  # length of each segment's queries
    keys: list[int]  # length of each segment's keys
    query_ends: Tensor  # [segments + 1] int32, on the device
    key_ends: Tensor
    key_index: Tensor | None  # [sum(keys)]: positions in the rank-major gathered keys; None without context parallelism
    window: int | None = None  # None too where no document is longer than the window
    chunked: bool = False  # whether some document was cut
    tiled: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cache of `tiles`

    def tiles(self, size: int) -> tuple[Tensor, Tensor]:
        """Tiles of `size` queries, and of keys, for fused/attention.py, which says how they are written."""
        if size not in self.tiled:
            queries, keys = _tiles(self, size)
            device = self.query_ends.device
            self.tiled[size] = to_device(queries, device), to_device(keys, device)
        return self.tiled[size]


def make_segments(
    bounds: list[int], cp_rank: int, cp_size: int, device: torch.device, span: AttentionSpan = FULL_SPAN
) -> Segments:
    """`bounds` [documents + 1]: where documents begin and end in the whole sequence; each divides by 2 x cp_size."""
    longest = max(end - start for start, end in pairwise(bounds))
    window, chunk = (limit if limit and limit < longest else None for limit in span)
    queries, keys, index = [], [], []
    for start, end in pairwise(bounds):
        places = gathered_positions(start, end - start, bounds[-1], cp_size) if cp_size > 1 else None
        for first, last in _held(end - start, cp_rank, cp_size):
            for low, high in _cut(first, last, chunk):
                seen = low // chunk * chunk if chunk else 0  # the first key that the first query may see
                if window:
                    seen = max(seen, low - window + 1)
                queries.append(high - low)
                keys.append(high - seen)
                if places is not None:
                    index.append(places[seen:high])
    key_index = to_device(torch.cat(index), device) if index else None
    ends = _ends(queries, device)
    key_ends = ends if keys == queries else _ends(keys, device)
    return Segments(queries, keys, ends, key_ends, key_index, window, chunk is not None)


def _tiles(segments: Segments, size: int) -> tuple[Tensor, Tensor]:
    """[n, 5] each: see Segments.tiles. Those with the most to do come first."""
    queries, keys = torch.tensor(segments.queries), torch.tensor(segments.keys)
    before = keys - queries
    about = torch.stack((queries.cumsum(0) - queries, queries, keys.cumsum(0) - keys, keys), dim=1)

    def listed(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the segment and first position of each tile, and the list of tiles."""
        counts = (lengths + size - 1) // size
        segment = torch.arange(len(lengths)).repeat_interleave(counts)
        first = (torch.arange(len(segment)) - (counts.cumsum(0) - counts)[segment]) * size
        return segment, first, torch.cat((about[segment], first.unsqueeze(1)), dim=1).to(torch.int32)

    span = segments.window or max(segments.keys)
    segment, first, tiles = listed(queries)
    met = (torch.minimum(first + size, queries[segment]) + before[segment]).clamp(max=span + size)
    of_queries = tiles[met.argsort(descending=True, stable=True)]
    segment, first, tiles = listed(keys)
    met = (queries[segment] - (first - before[segment]).clamp(min=0)).clamp(max=span + size)
    return of_queries, tiles[met.argsort(descending=True, stable=True)]


def _held(length: int, cp_rank: int, cp_size: int) -> list[tuple[int, int]]:
    """Return the parts of a document that a rank holds: its positions, in the rank's order."""
    if cp_size == 1:
        return [(0, length)]
    part = length // (2 * cp_size)
    return [(number * part, (number + 1) * part) for number in (cp_rank, 2 * cp_size - 1 - cp_rank)]


def _cut(first: int, last: int, chunk: int | None) -> Iterator[tuple[int, int]]:
    """Positions first..last of a document in pieces that do not cross the ends of its chunks."""
    while chunk and first // chunk < (last - 1) // chunk:
        end = (first // chunk + 1) * chunk
        yield first, end
        first = end
    yield first, last


def gathered_positions(start: int, length: int, total: int, cp_size: int) -> Tensor:
    """[length]: where each position of a document lies once the ranks' tokens are laid one rank after another."""
    part = length // (2 * cp_size)
    places = []
    for number in range(2 * cp_size):
        rank, second = (number, 0) if number < cp_size else (2 * cp_size - 1 - number, 1)
        place = rank * (total // cp_size) + start // cp_size + second * part
        places.append(torch.arange(place, place + part))
    return torch.cat(places)


def next_positions(bounds: list[int], cp_rank: int, cp_size: int, device: torch.device) -> Tensor:
    """[local sequence]: where the next position of the same document lies once the ranks' tokens are laid one rank
    after another; -1 behind a document's last. `bounds` as in `make_segments`."""
    positions = []
    for start, end in pairwise(bounds):
        places = (
            gathered_positions(start, end - start, bounds[-1], cp_size) if cp_size > 1 else torch.arange(start, end)
        )
        after = torch.cat((places[1:], torch.tensor([-1])))
        positions += [after[first:last] for first, last in _held(end - start, cp_rank, cp_size)]
    return to_device(torch.cat(positions), device)


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    return to_device(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an asynchronous copy: nothing waits for the device. A tensor that is there already is itself."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass
class Documents(PackedSeqParams):
    """A micro batch's documents, for every layer."""

    segments: dict[AttentionSpan, Segments] = field(default_factory=dict)  # for each reach that the model's layers have
    rotary: tuple[RotaryTables, ...] = ()  # for each of Architecture.ropes
    positions: Tensor | None = None  # [sequence, batch], within documents
    next_positions: Tensor | None = None  # where `following` says, for mtp.py
    runs: Any = None  # the Runs of delta_rule.py
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
) -> Documents:
    """position_ids [batch, local sequence] on the device; cu_seqlens [documents + 1] on the CPU, over the whole row
    (None: rows are padded instead of packed); max_seqlen: the longest document."""
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

    def long(original: int) -> Tensor | bool:
        """Select the tokens of documents longer than `original`: all or none, or [local sequence]."""
        lengths = [end - start for start, end in pairwise(bounds)] if cu_seqlens is not None else [max_seqlen]
        is_long = [length > original for length in lengths]
        if all(is_long) or not any(is_long):
            return is_long[0]
        here = torch.tensor(lengths) // cp_size
        return to_device(torch.tensor(is_long).repeat_interleave(here), device)

    return Documents(
        **packed,
        segments={span: make_segments(bounds, cp_rank, cp_size, device, span) for span in set(spans)},
        rotary=tuple(make_rotary_tables(position_ids, rope, long, dtype) for rope in ropes),
        positions=position_ids.t(),
    )
