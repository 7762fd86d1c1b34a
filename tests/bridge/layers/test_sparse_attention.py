"""The keys that an indexer selects by its formula, and attention to them in chunks, against one mask of all scores."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from megaswift.bridge.layers import indexer, sparse_attention
from megaswift.bridge.layers.indexer import Indexer, IndexerStates
from megaswift.bridge.layers.packed_seqs import make_segments
from megaswift.bridge.mapping.architecture import SparseAttention
from megaswift.bridge.model.config import _check_selections

SPARSE = SparseAttention(topk=7, heads=4, head_dim=6, interleaved=False, sources=(0,))
HEADS, DIM = 3, 5
SHARING = SPARSE._replace(sources=(0, 0, 2, 2))
ROWS = {1: [0, 24, 28, 68], 2: [0, 68]}  # boundaries by the number of rows; one document has fewer than topk tokens


def select(query, key, weights, bounds, *, chunks):
    """By the indexer: [sequence, rows, topk]."""
    config = SimpleNamespace(
        q_lora_rank=8,
        hidden_size=9,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        sequence_parallel=False,
        dsa_indexer_loss_coeff=None,
    )
    module = Indexer(config, SPARSE, None, None)  # type: ignore[arg-type]
    segments = make_segments(bounds, 0, 1, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if chunks:
            patch.setattr(indexer, "MAX_SCORES", 5 * SPARSE.heads * 40)
        return module.select(IndexerStates(query, key, weights, 0), segments)


def masks(query, key, weights, bounds):
    """By the formula, a query and a key at a time: [rows, sequence, sequence]."""
    mask = torch.zeros(query.shape[1], bounds[-1], bounds[-1], dtype=torch.bool)
    for start, end in pairwise(bounds):
        for row in range(query.shape[1]):
            for at in range(start, end):
                products = query[at, row] @ key[start : at + 1, row].T / SPARSE.head_dim**0.5
                scores = (weights[at, row, :, None] * products.relu()).sum(0)
                mask[row, at, start + scores.topk(min(SPARSE.topk, len(scores))).indices] = True
    return mask


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("chunks", [False, True], ids=["at once", "in chunks"])
def test_queries_attend_to_the_keys_with_the_highest_scores(rows, chunks, monkeypatch):
    if chunks:
        monkeypatch.setattr(sparse_attention, "MAX_CHUNK", 5)
    torch.manual_seed(3)
    bounds = ROWS[rows]
    scored = [torch.randn(bounds[-1], rows, *shape) for shape in ((SPARSE.heads, SPARSE.head_dim), (SPARSE.head_dim,))]
    scored.append(torch.rand(bounds[-1], rows, SPARSE.heads))
    selection, mask = select(*scored, bounds, chunks=chunks), masks(*scored, bounds)
    states = [torch.randn(bounds[-1], rows, HEADS, dim, dtype=torch.float64) for dim in (DIM, DIM, DIM - 1)]

    def in_segments(query, key, value):
        attend = partial(sparse_attention._attend_to_selected, scale=0.3, dropout=0.0)
        segments = make_segments(bounds, 0, 1, torch.device("cpu"))
        return sparse_attention.sparse_attention(query, key, value, segments, selection, attend)

    def by_mask(query, key, value):
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * 0.3
        shares = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", shares, value).flatten(2)

    results = []
    for compute in (in_segments, by_mask):
        leaves = [x.clone().requires_grad_() for x in states]
        output = compute(*leaves)
        output.square().sum().backward()
        results.append([output.detach(), *(x.grad for x in leaves)])
    torch.testing.assert_close(*results)


def test_a_stage_begins_with_a_layer_that_selects():
    _check_selections(SHARING, [2, 2])
    _check_selections(SHARING, [4])
    with pytest.raises(ValueError, match=r"layer 1, which .* layer 0 selects, .* begin with any of \[0, 2\], by"):
        _check_selections(SHARING, [1, 1, 2])
