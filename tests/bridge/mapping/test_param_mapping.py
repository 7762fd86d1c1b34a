"""The kinds of rows: against splits written out by hand, and whole -> shards -> whole for every number of ranks."""

import pytest
import torch
from megaswift.bridge.mapping.architecture import Architecture
from megaswift.bridge.mapping.param_mapping import (
    COLUMN,
    GATE_UP,
    QKV,
    REPLICATED,
    ROW,
    VOCAB,
    MappingEntry,
    ShardingKind,
    Span,
    clip_spans,
)

HEADS, GROUPS, HEAD_DIM, VOCABULARY = 8, 2, 4, 261


def architecture(groups: int = GROUPS) -> Architecture:
    return Architecture({"num_attention_heads": HEADS, "num_query_groups": groups}, VOCABULARY, False, 64, 1e4, None)


def shards_of(
    kind: ShardingKind, parts: list[torch.Tensor], length: int, ranks: int, about: Architecture
) -> list[torch.Tensor]:
    """Each rank's shard, built as loading does it."""
    dim, spans = kind.dim or 0, kind.spans(length, ranks, about)
    shape = list(parts[0].shape)
    shape[dim] = size = length // ranks
    shards = []
    for rank in range(ranks):
        shard = torch.full(shape, torch.nan)
        for at, span in clip_spans(spans, rank * size, (rank + 1) * size):
            places = range(span.start, span.stop, span.step)
            piece = 0 if span.part is None else parts[span.part].index_select(dim, torch.tensor(places))
            shard.narrow(dim, at, span.length).copy_(torch.as_tensor(piece))
        shards.append(shard)
    return shards


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_matrices(ranks):
    whole = torch.randn(12, 8)
    assert torch.equal(torch.cat(shards_of(COLUMN, [whole], 12, ranks, architecture())), whole)
    rows = shards_of(ROW, [whole], 8, ranks, architecture())
    assert all(torch.equal(shard, piece) for shard, piece in zip(rows, whole.chunk(ranks, 1), strict=True))
    assert torch.equal(shards_of(REPLICATED, [whole], 12, 1, architecture())[0], whole)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gate_and_up(ranks):
    gate, up = torch.randn(12, 5), torch.randn(12, 5)
    for rank, shard in enumerate(shards_of(GATE_UP, [gate, up], 24, ranks, architecture())):
        assert torch.equal(shard, torch.cat((gate.chunk(ranks)[rank], up.chunk(ranks)[rank])))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("features", [(5,), ()], ids=["weight", "bias"])
def test_query_groups(ranks, groups, features):
    """With fewer groups than ranks too, each rank holds an equal window of the fused rows."""
    q, k, v = (torch.randn(heads * HEAD_DIM, *features) for heads in (HEADS, groups, groups))
    by_group = [part.reshape(groups, -1, *features) for part in (q, k, v)]
    fused = torch.cat(by_group, dim=1).flatten(0, 1)
    shards = shards_of(QKV, [q, k, v], len(fused), ranks, architecture(groups))
    assert torch.equal(torch.cat(shards), fused)
    assert len({shard.shape for shard in shards}) == 1


def _alternating(length: int, ranks: int, about: Architecture) -> list[Span]:
    size = length // (2 * ranks)
    starts = [(r * 2 * size + part, (r + 1) * 2 * size) for r in range(ranks) for part in (0, 1)]
    return [Span(0, start, stop, 2) for start, stop in starts]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_other_position(ranks):
    """Gate and up in alternating rows of one tensor, as GPT-OSS stores them."""
    fused = torch.randn(24, 5)
    shards = shards_of(ShardingKind(0, _alternating), [fused], 24, ranks, architecture())
    for shard, gate, up in zip(shards, fused[::2].chunk(ranks), fused[1::2].chunk(ranks), strict=True):
        assert torch.equal(shard, torch.cat((gate, up)))
    entry = MappingEntry(ShardingKind(0, _alternating), ("w",), transposed=True, num_experts=7, expert_index=3)
    shard = (24 // ranks, 5)
    shape = entry.hf_shapes(shard, entry.spans(shard, ranks, architecture()))["w"]
    assert (shape, entry.stored_shape(shape)) == ((5, 24), (7, 5, 24))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vocabulary_is_padded_with_zeros(ranks):
    words = torch.randn(VOCABULARY, 5)
    padded = -(-VOCABULARY // ranks) * ranks
    whole = torch.cat(shards_of(VOCAB, [words], padded, ranks, architecture()))
    assert torch.equal(whole[:VOCABULARY], words)
    assert not whole[VOCABULARY:].any()
