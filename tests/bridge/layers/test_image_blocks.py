"""Masks of documents with images whose tokens attend in both directions, against those of transformers."""

from itertools import pairwise

import pytest
import torch
from megaswift.bridge.layers.attention import _mask
from megaswift.bridge.layers.packed_seqs import AttentionSpan, make_packed_seqs, make_segments
from torch import Tensor
from transformers.masking_utils import blockwise_overlay, causal_mask_function, sliding_window_overlay

from tests.bridge.layers.test_layers import held_by

CPU = torch.device("cpu")
# Images at the start and the end of documents, beside each other, across the parts of ranks, and none.
BOUNDS = [0, 16, 40, 48, 64]
BLOCKS = [(0, 5), (7, 9), (9, 16), (19, 33), (61, 64)]


def mask_of_transformers(length: int, start: int, blocks: list[tuple[int, int]], window: int | None) -> Tensor:
    """The mask of one document that begins at `start`: bool [length, length]."""
    numbers = torch.full((1, length), -1)
    for number, (low, high) in enumerate(blocks):
        if start <= low < start + length:
            numbers[0, low - start : high - start] = number
    in_block = blockwise_overlay(numbers)
    index = torch.arange(length)
    rows = []
    for query in index:
        seen = causal_mask_function(0, 0, query, index) | in_block(0, 0, query, index)
        rows.append(seen & sliding_window_overlay(window)(0, 0, query, index) if window else seen)
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 3, 10])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_masks_are_those_of_transformers(cp_size: int, window: int | None) -> None:
    held = [held_by(rank, cp_size, BOUNDS) for rank in range(cp_size)]
    gathered = torch.cat(held)
    found = torch.zeros(BOUNDS[-1], BOUNDS[-1], dtype=torch.bool)
    for rank in range(cp_size):
        segments = make_segments(BOUNDS, rank, cp_size, CPU, AttentionSpan(window), blocks=BLOCKS)
        assert segments.key_index is not None
        assert segments.keys_ahead is not None
        pieces = held[rank].split(segments.queries), gathered[segments.key_index].split(segments.keys)
        for queries, keys, ahead in zip(*pieces, segments.keys_ahead, strict=True):
            mask = _mask(len(queries), len(keys), segments.window, CPU, ahead)
            mask = torch.ones(len(queries), len(keys), dtype=torch.bool).tril() if mask is None else mask
            found[queries[:, None], keys] = mask
    expected = torch.block_diag(
        *(mask_of_transformers(end - start, start, BLOCKS, window).long() for start, end in pairwise(BOUNDS))
    )
    assert found.equal(expected.bool())


def test_a_document_continues_a_prefix_with_images() -> None:
    """Documents 1 and 2 continue document 0, as answers do their prompt; the last one has an image itself."""
    bounds, blocks = [0, 10, 14, 20], [(2, 6), (15, 18)]
    segments = make_segments(bounds, 0, 1, CPU, AttentionSpan(7), [-1, 0, 0], blocks)
    assert segments.key_index is not None
    assert segments.keys_ahead is not None
    found = torch.zeros(20, 20, dtype=torch.bool)
    pieces = torch.arange(20).split(segments.queries), segments.key_index.split(segments.keys)
    for queries, keys, ahead in zip(*pieces, segments.keys_ahead, strict=True):
        mask = _mask(len(queries), len(keys), segments.window, CPU, ahead)
        found[queries[:, None], keys] = (
            torch.ones(len(queries), len(keys), dtype=torch.bool).tril() if mask is None else mask
        )
    for start, end in ((10, 14), (14, 20)):
        whole = [*blocks[:1], *((low - start + 10, high - start + 10) for low, high in blocks[1:] if low >= start)]
        expected = mask_of_transformers(10 + end - start, 0, whole, 7)
        assert found[start:end][:, [*range(10), *range(start, end)]].equal(expected[10:])
        assert found[start:end].sum() == expected[10:].sum()
    assert found[:10, :10].equal(mask_of_transformers(10, 0, blocks[:1], 7))


def test_blocks_in_layers_with_a_window_alone() -> None:
    """Gemma 4: layers with full attention are causal, also where a window is longer than the documents."""
    spans = full, window = AttentionSpan(), AttentionSpan(100)
    positions, ends = torch.arange(8).unsqueeze(0), torch.tensor([0, 8], dtype=torch.int32)
    settings = {"ropes": (), "spans": spans, "dtype": torch.float32, "blocks": [(0, 2, 5)]}
    documents = make_packed_seqs(positions, ends, 8, **settings, blocks_in_windows=True)
    assert documents.segments[window].keys_ahead == [None, 0, None]
    assert documents.segments[full].keys_ahead is None
    assert documents.segments[full].queries == [8]
    assert make_packed_seqs(positions, ends, 8, **settings).segments[full].keys_ahead == [None, 0, None]


def test_padded_rows_have_masks_of_their_own() -> None:
    positions = torch.arange(8).expand(2, 8)
    settings = {"ropes": (), "spans": [AttentionSpan()], "dtype": torch.float32}
    documents = make_packed_seqs(positions, None, 8, **settings, blocks=[(1, 2, 5)])
    assert [row[AttentionSpan()].queries for row in documents.row_segments] == [[8], [2, 3, 3]]
    assert [row[AttentionSpan()].keys_ahead for row in documents.row_segments] == [None, [None, 0, None]]
    assert make_packed_seqs(positions, None, 8, **settings).row_segments == ()
