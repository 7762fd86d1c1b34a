"""Loss of a lightning indexer (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1).

The indexer learns the distribution of its layer's attention, summed over the heads: the loss of a query is the
Kullback-Leibler divergence from it to the softmax of the indexer's scores. It is over all earlier keys of the document,
or over the selected ones alone. No gradient goes to the rest of the model, nor from its loss to the indexer.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .indexer import IndexerStates, score_keys
from .packed_seqs import FULL_SPAN, Documents, Segments

MAX_CHUNK = 512  # queries
MAX_SCORES = 2**26  # in memory at once, in fp32
METRIC = "indexer_loss"  # in the log


class AttentionStates(NamedTuple):
    """Attention that an indexer learns, without gradients."""

    query: Tensor  # [sequence, batch, heads, dim], this rank's heads
    key: Tensor  # [keys, batch, heads, dim], the keys of all segments
    scale: float
    tp_group: dist.ProcessGroup
    selection: Tensor | None  # as of `Indexer.select`; None: all keys are selected


def attach_loss(
    context: Tensor,
    states: IndexerStates,
    attention: AttentionStates,
    documents: Documents,
    config: TransformerConfig,
    layer_number: int,
) -> Tensor:
    """Return `context`, whose backward pass starts that of the indexer's loss. Record the loss for the log.

    The loss is a mean over the tokens of the micro batch, without padding. A rank has the part of its own queries.
    """
    coeff = config.dsa_indexer_loss_coeff
    assert documents.token_shares is not None
    assert coeff is not None
    architecture = config.architecture  # type: ignore[attr-defined]
    if not config.dsa_indexer_use_sparse_loss:
        attention = attention._replace(selection=None)
    segments = documents.segments[FULL_SPAN]
    loss = cast(Tensor, _IndexerLoss.apply(*states[:3], states.first, attention, segments, documents.token_shares))
    copies = 1 if config.sequence_parallel else attention.tp_group.size()
    layers = len(architecture.layers) + architecture.mtp_depths
    get_moe_metrics_tracker().record(METRIC, loss / copies, layer_number, layers)
    return cast(Tensor, DSAIndexerLossAutoScaler.apply(context, loss * coeff))


class _IndexerLoss(torch.autograd.Function):
    """Loss of an indexer, whose gradients are computed in the forward pass, in chunks of queries."""

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        first: int,
        attention: AttentionStates,
        segments: Segments,
        shares: Tensor,
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=query.device)
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, weights)]
        states = IndexerStates(query, key, weights, first)
        for chunk in _chunks(states, attention, segments):
            target, mask = _target(attention, chunk)
            rows = slice(max(chunk.begin, first), min(chunk.end, first + len(query)))
            if rows.start >= rows.stop:  # another tensor-parallel rank's, which needs this one's heads
                continue
            inside = slice(rows.start - chunk.begin, rows.stop - chunk.begin)
            local = slice(rows.start - first, rows.stop - first)
            slices = local, chunk.keys, local
            with torch.enable_grad():
                leaves = [x[part].detach().requires_grad_() for x, part in zip(states[:3], slices, strict=True)]
                scores = score_keys(*leaves)
                divergences = _divergence(target[:, inside].transpose(0, 1), scores, mask[:, inside].transpose(0, 1))
                part = (divergences * shares[rows]).sum()
            for total, at, grad in zip(grads, slices, torch.autograd.grad(part, leaves), strict=True):
                total[at] += grad
            loss += part.detach()
        ctx.save_for_backward(*grads)
        ctx.dtypes = [x.dtype for x in states[:3]]
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grads = [(total * grad).to(dtype) for total, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *grads, None, None, None, None


class _Chunk(NamedTuple):
    """Queries of one segment, and the keys of it up to the last of them."""

    begin: int  # position of the first query in the local sequence
    end: int
    keys: slice  # range in the keys of all segments


def _chunks(states: IndexerStates, attention: AttentionStates, segments: Segments) -> Iterator[_Chunk]:
    """Yield the chunks of all queries of the local sequence, the same ones on all tensor-parallel ranks."""
    heads, batch = max(states.query.shape[2], attention.query.shape[2]), states.query.shape[1]
    start = first_key = 0
    for queries, keys in zip(segments.queries, segments.keys, strict=True):
        step = max(min(MAX_CHUNK, MAX_SCORES // (batch * heads * keys)), 1)
        for begin in range(0, queries, step):
            end = min(begin + step, queries)
            yield _Chunk(start + begin, start + end, slice(first_key, first_key + keys - queries + end))
        start, first_key = start + queries, first_key + keys


def _target(attention: AttentionStates, chunk: _Chunk) -> tuple[Tensor, Tensor]:
    """Return attention's distribution and the mask of its keys: fp32 and bool [batch (or 1), queries, keys]."""
    query, key = attention.query[chunk.begin : chunk.end].float(), attention.key[chunk.keys].float()
    selection = attention.selection
    selected = None if selection is None else selection[chunk.begin : chunk.end]
    mask = visible_keys(len(query), len(key), selected, query.device)
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key).mul_(attention.scale)
    sums = scores.masked_fill_(~mask.unsqueeze(1), -torch.inf).softmax(-1).sum(1)
    if attention.tp_group.size() > 1:
        dist.all_reduce(sums, group=attention.tp_group)
    return sums / sums.sum(-1, keepdim=True), mask


def _divergence(target: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """Return KL(target || softmax(scores)) over the keys in the mask: [queries, batch].

    target, scores, mask: [queries, batch or 1, keys]
    """
    log_probs = scores.masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)
    return (torch.xlogy(target, target) - target * log_probs).sum(-1)


def visible_keys(queries: int, keys: int, selection: Tensor | None, device: torch.device) -> Tensor:
    """Return the mask of attended keys, [batch or 1, queries, keys]: the last query and the last key are one token.

    selection [queries, batch, topk]. With no more than topk keys every query attends to all of them up to itself.
    """
    mask = torch.ones(1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if selection is None or keys <= selection.shape[-1]:
        return mask
    # Keys behind the chunk are out of the mask: one more column takes them.
    is_selected = mask.new_zeros(selection.shape[1], queries, keys + 1)
    is_selected.scatter_(-1, selection.transpose(0, 1).clamp(max=keys).long(), True)
    return is_selected[..., :keys] & mask
