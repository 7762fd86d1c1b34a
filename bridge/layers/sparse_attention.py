"""Multi-latent attention to the keys that a lightning indexer selects (DeepSeek-V3.2 and GLM-5).

Micro batches whose documents have no more tokens than the indexer selects go through `LatentAttention`: all keys are
selected. In others the queries of a document are taken in chunks, which are computed again in the backward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..mapping.architecture import Architecture
from .attention import select_rows
from .indexer import Indexer, IndexerStates
from .indexer_loss import AttentionStates, attach_loss, visible_keys
from .mla import LatentAttention
from .packed_seqs import FULL_SPAN, Documents, Segments

MAX_CHUNK = 512  # queries
MAX_SCORES = 2**28  # scores per chunk, since a kernel may hold them in memory


class Selection(NamedTuple):
    """Selection of a layer's keys."""

    keys: Tensor | None = None  # as of `Indexer.select`; None: all
    states: IndexerStates | None = None  # for the indexer's loss; None: it has none


class SparseLatentAttention(LatentAttention):
    """Causal multi-latent self-attention to selected keys: a `self_attention` for layer specs.

    A layer without an indexer takes the selection of an earlier layer, which must be on the same pipeline stage.
    """

    def __init__(self, config, layer_number: int, submodules, pg_collection=None, **settings):
        super().__init__(config, layer_number, submodules, pg_collection=pg_collection, **settings)
        assert pg_collection is not None
        architecture: Architecture = config.architecture
        assert architecture.sparse is not None
        self.sparse, self.cp_group = architecture.sparse, pg_collection.cp
        layer, sources = layer_number - 1, self.sparse.sources
        self.source = sources[layer] if layer < len(sources) else layer  # layers of multi-token prediction are behind
        self.layer, self.is_shared = layer, sources.count(layer) > 1
        self.indexer = None
        if self.source == layer:
            self.indexer = Indexer(config, self.sparse, pg_collection.tp, pg_collection.cp)

    def _select(self, hidden_states: Tensor, query_source: Tensor, documents: Documents) -> Selection:
        segments = documents.segments[FULL_SPAN]
        assert documents.positions is not None
        # The ranks of context parallelism decide alike, though their segments have different numbers of keys.
        packed_length = documents.max_seqlen_q if documents.qkv_format == "thd" else None
        longest = packed_length or len(documents.positions) * self.cp_group.size()
        selects = max(longest, *segments.keys) > self.sparse.topk
        if self.indexer is None:
            return Selection(documents.selections[self.source] if selects else None)
        # Recomputed layers run twice, the first time without gradients.
        trains = self.training and torch.is_grad_enabled() and any(x.requires_grad for x in self.indexer.parameters())
        if not selects and not trains:
            return Selection()
        with torch.set_grad_enabled(trains):
            states = self.indexer(hidden_states.detach(), query_source.detach(), documents, segments)
        keys = self.indexer.select(states, segments) if selects else None
        if self.is_shared and keys is not None:
            documents.selections[self.layer] = keys
        return Selection(keys, states if trains else None)

    def _attach_loss(
        self, context: Tensor, query: Tensor, key: Tensor, documents: Documents, selection: Selection
    ) -> Tensor:
        if selection.states is None:
            return context
        scale = self.core_attention.softmax_scale or self.query_dim**-0.5
        attention = AttentionStates(
            query.detach(), self._segment_keys(key.detach(), documents), scale, self.tp_group, selection.keys
        )
        return attach_loss(context, selection.states, attention, documents, self.config, self.layer_number)

    def _segment_keys(self, x: Tensor, documents: Documents) -> Tensor:
        """Return the keys of all segments, [sum(segments.keys), ...], of this rank's keys or values."""
        segments = documents.segments[FULL_SPAN]
        if segments.key_index is None:
            return x
        if self.cp_group.size() > 1:  # all-gather forward, reduce-scatter backward
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.cp_group)
        return select_rows(x, segments.key_index)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, selection: Selection) -> Tensor:
        if selection.keys is None:
            return super()._attend(query, key, value, documents, selection)
        key, value = (self._segment_keys(x, documents) for x in (key, value))
        segments = documents.segments[FULL_SPAN]
        core = self.core_attention
        dropout = core.dropout if self.training else 0.0
        attend = partial(_attend_to_selected, scale=core.softmax_scale, dropout=dropout)
        if dropout and not self.config.sequence_parallel:
            # Tensor-parallel ranks have different heads, so their dropout must differ.
            with get_cuda_rng_tracker().fork():  # pyright: ignore[reportOptionalMemberAccess]
                return sparse_attention(query, key, value, segments, selection.keys, attend)
        return sparse_attention(query, key, value, segments, selection.keys, attend)


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, selection: Tensor, attend: Callable[..., Tensor]
) -> Tensor:
    """Return the attention output, [sequence, batch, heads * value dim].

    query [sequence, batch, heads, dim], key and value [keys, batch, heads, dim]; selection [sequence, batch, topk]:
    see `Indexer.select`. attend: `_attend_to_selected` with its settings.
    """
    outputs = []
    states = query.split(segments.queries), key.split(segments.keys), value.split(segments.keys)
    for q, k, v, selected in zip(*states, selection.split(segments.queries), strict=True):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # [batch, heads, length, dim]
        first = k.shape[2] - q.shape[2]  # position of the first query among the keys
        chunk = min(MAX_CHUNK, max(MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]), 1))
        for begin in range(0, q.shape[2], chunk):
            end = min(begin + chunk, q.shape[2])
            visible = first + end
            arguments = q[:, :, begin:end], k[:, :, :visible], v[:, :, :visible], selected[begin:end]
            output = checkpoint(attend, *arguments, use_reentrant=False)
            assert isinstance(output, Tensor)
            outputs.append(output)
    return torch.cat(outputs)


def _attend_to_selected(
    query: Tensor, key: Tensor, value: Tensor, selection: Tensor, *, scale: float | None, dropout: float
) -> Tensor:
    """Return the attention output of one document's queries, [queries, batch, heads * value dim].

    query [batch, heads, queries, dim], key and value [batch, heads, keys, dim]: the last of both are the same token.
    selection [queries, batch, topk]. With no more than topk keys every query attends to all of them up to itself.
    """
    mask = visible_keys(query.shape[2], key.shape[2], selection, query.device).unsqueeze(1)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    return output.permute(2, 0, 1, 3).flatten(2)
