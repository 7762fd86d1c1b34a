"""Lightning indexer of sparse attention (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1).

A few small heads score each earlier token for each query, and the query attends to the `topk` tokens with the highest
scores. The choice is not differentiable: an indexer learns from a loss of its own (indexer_loss.py), or is frozen.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from ..mapping.architecture import SparseAttention
from .attention import select_rows
from .packed_seqs import Documents, Segments
from .rope import apply_rotary, slice_rotary

KEY_EPS = 1e-6  # norm of keys; transformers too ignores the eps in config.json here
MAX_SCORES = 2**25  # in memory at once, in fp32


class IndexerStates(NamedTuple):
    """Heads of an indexer for the queries first, first + 1, ... of the local sequence, and for all keys of segments."""

    query: Tensor  # [queries, batch, heads, dim]
    key: Tensor  # [keys, batch, dim]
    weights: Tensor  # [queries, batch, heads] fp32
    first: int


class _Fp32Linear(torch.nn.Linear):
    """Linear layer without bias that computes in fp32, as in transformers."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float())


class Indexer(torch.nn.Module):
    """Indexer of a layer, replicated on all tensor-parallel ranks. Names are those of transformers' class."""

    def __init__(self, config: MLATransformerConfig, sparse: SparseAttention, tp_group, cp_group):
        super().__init__()
        assert config.q_lora_rank is not None
        self.sparse, self.tp_group, self.cp_group = sparse, tp_group, cp_group
        self.sequence_parallel = config.sequence_parallel
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        settings = {"dtype": config.params_dtype, "device": device}
        self.wq_b = torch.nn.Linear(config.q_lora_rank, sparse.heads * sparse.head_dim, bias=False, **settings)
        self.wk = torch.nn.Linear(config.hidden_size, sparse.head_dim, bias=False, **settings)
        self.k_norm = torch.nn.LayerNorm(sparse.head_dim, eps=KEY_EPS, **settings)
        self.weights_proj = _Fp32Linear(config.hidden_size, sparse.heads, bias=False, **settings)
        self.requires_grad_(bool(config.dsa_indexer_loss_coeff))
        for parameter in self.parameters():
            # With sequence parallelism each rank has different queries, so the gradients are summed over the ranks.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, latent_query: Tensor, documents: Documents, segments: Segments) -> IndexerStates:
        """Return the heads of this rank's queries and of all keys.

        hidden [sequence (/ TP under sequence parallelism), batch, hidden_size] and latent_query [..., q_lora_rank] are
        the inputs of attention and of its query heads.
        """
        rows = len(hidden)
        first = self.tp_group.rank() * rows if self.sequence_parallel else 0
        rotary = slice_rotary(documents.rotary[0], first, first + rows, interleaved=self.sparse.interleaved)
        query = apply_rotary(self.wq_b(latent_query).unflatten(-1, (self.sparse.heads, -1)), rotary)
        key = apply_rotary(self.k_norm(self.wk(hidden)).unsqueeze(2), rotary).squeeze(2)
        weights = self.weights_proj(hidden) * self.sparse.heads**-0.5
        if self.sequence_parallel:
            key = tensor_parallel.gather_from_sequence_parallel_region(key, group=self.tp_group)
        if segments.key_index is not None:
            if self.cp_group.size() > 1:
                key = tensor_parallel.gather_from_sequence_parallel_region(key, group=self.cp_group)
            key = select_rows(key, segments.key_index)
        return IndexerStates(query, key, weights, first)

    @torch.no_grad()
    def select(self, states: IndexerStates, segments: Segments) -> Tensor:
        """Return the keys of each query: [sequence, batch, topk] int32, indices into the keys of its segment.

        Queries of segments with no more than topk keys get zeros. A tensor-parallel rank with a part of the sequence
        selects for it, and gathers what the others have selected.
        """
        selection = self._select(states, segments)
        if self.sequence_parallel:
            selection = tensor_parallel.gather_from_sequence_parallel_region(selection, group=self.tp_group)
        return selection

    def _select(self, states: IndexerStates, segments: Segments) -> Tensor:
        """Select for the queries of `states`."""
        query, key, weights, first = states
        count, batch = query.shape[:2]
        selection = torch.zeros(count, batch, self.sparse.topk, dtype=torch.int32, device=query.device)
        start = 0
        for queries, keys in zip(segments.queries, key.split(segments.keys), strict=True):
            low, high = (min(max(position - first, 0), count) for position in (start, start + queries))
            if len(keys) > self.sparse.topk and low < high:
                step = max(MAX_SCORES // (batch * self.sparse.heads * len(keys)), 1)
                for begin in range(low, high, step):
                    chunk = slice(begin, min(begin + step, high))
                    # Position of the chunk's first query in the keys.
                    position = len(keys) - queries + begin + first - start
                    selection[chunk] = self._top_keys(query[chunk], keys, weights[chunk], position)
            start += queries
        return selection

    def _top_keys(self, query: Tensor, key: Tensor, weights: Tensor, position: int) -> Tensor:
        """Return the best keys of queries at `position` and later, [queries, batch, topk]: of the first, any as well.

        query [queries, batch, heads, dim], key [keys, batch, dim], weights [queries, batch, heads].
        """
        scores = score_keys(query, key, weights)
        future = torch.ones(len(query), len(key), dtype=torch.bool, device=key.device).triu(position + 1)
        return scores.masked_fill_(future.unsqueeze(1), -torch.inf).topk(self.sparse.topk, sorted=False).indices.int()


def score_keys(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Return the score of each key for each query, fp32 [queries, batch, keys].

    query [queries, batch, heads, dim], key [keys, batch, dim], weights [queries, batch, heads].
    """
    scores = torch.einsum("qbhd,kbd->qbhk", query.float(), key.float()) * query.shape[-1] ** -0.5
    return torch.einsum("qbhk,qbh->qbk", scores.relu_(), weights)
