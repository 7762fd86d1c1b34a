"""Lightning indexer of sparse attention (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1).

A few small heads score each earlier token for each query, and the query attends to the `topk` tokens with the highest
scores. The choice is not differentiable, so the indexer is frozen: its own loss is not computed.
"""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from ..mapping.param_mapping import SparseAttention
from .packed_seqs import Documents, Segments
from .rope import apply_rotary, slice_rotary

KEY_EPS = 1e-6  # norm of keys; transformers too ignores the eps in config.json here
MAX_SCORES = 2**25  # in memory at once, in fp32


class Indexer(torch.nn.Module):
    """Frozen indexer of a layer, replicated on all tensor-parallel ranks. Names are those of transformers' class."""

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
        self.weights_proj = torch.nn.Linear(config.hidden_size, sparse.heads, bias=False, **settings)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: Tensor, latent_query: Tensor, documents: Documents, segments: Segments) -> Tensor:
        """Select the keys of each query: [sequence, batch, topk] int32, indices into the keys of its segment.

        hidden [sequence (/ TP under sequence parallelism), batch, hidden_size] and latent_query [..., q_lora_rank] are
        the inputs of attention and of its query heads. Queries of segments with no more than topk keys get zeros.
        A tensor-parallel rank with a part of the sequence selects for it, and gathers what the others have selected.
        """
        rows = len(hidden)
        first = self.tp_group.rank() * rows if self.sequence_parallel else 0
        rotary = slice_rotary(documents.rotary[0], first, first + rows, interleaved=self.sparse.interleaved)
        query = apply_rotary(self.wq_b(latent_query).unflatten(-1, (self.sparse.heads, -1)), rotary)
        key = apply_rotary(self.k_norm(self.wk(hidden)).unsqueeze(2), rotary).squeeze(2)
        # transformers too has these in fp32: they multiply the scores of all keys.
        weights = F.linear(hidden.float(), self.weights_proj.weight.float()) * self.sparse.heads**-0.5
        if self.sequence_parallel:
            key = tensor_parallel.gather_from_sequence_parallel_region(key, group=self.tp_group)
        if segments.key_index is not None:
            if self.cp_group.size() > 1:
                key = tensor_parallel.gather_from_sequence_parallel_region(key, group=self.cp_group)
            key = key.index_select(0, segments.key_index)
        selection = self._select(query, key, weights, segments, first)
        if self.sequence_parallel:
            selection = tensor_parallel.gather_from_sequence_parallel_region(selection, group=self.tp_group)
        return selection

    def _select(self, query: Tensor, key: Tensor, weights: Tensor, segments: Segments, first: int) -> Tensor:
        """Select for the queries first, first + 1, ... of the local sequence, of which `query` and `weights` are."""
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
        scores = torch.einsum("qbhd,kbd->qbhk", query.float(), key.float()) * self.sparse.head_dim**-0.5
        scores = torch.einsum("qbhk,qbh->qbk", scores.relu_(), weights)
        future = torch.ones(len(query), len(key), dtype=torch.bool, device=key.device).triu(position + 1)
        return scores.masked_fill_(future.unsqueeze(1), -torch.inf).topk(self.sparse.topk, sorted=False).indices.int()
