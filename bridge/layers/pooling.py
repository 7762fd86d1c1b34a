"""Values per document of a row: hidden states of last tokens, means of hidden states, scores, and sums over tokens.

With context parallelism a rank has a part of each document, with sequence parallelism a part of the row. Results are
the same on every rank of both. Each tensor-parallel rank computes the full loss, each context-parallel rank a share of
it, so gradients are summed over context-parallel ranks but not over tensor-parallel ranks.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn

from .packed_seqs import to_device


class ScoreHead(nn.Module):
    """Output layer that scores documents: `score` of transformers' sequence classification."""

    def __init__(self, labels: int, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(labels, hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """[documents, hidden_size] -> [documents, labels], in fp32."""
        return F.linear(hidden.float(), self.weight.float())


def sum_documents(values: Tensor, spans: Tensor, segments: Tensor, prefixes: Tensor | None = None) -> Tensor:
    """Return the sums of `values` [1, local length] over each document's tokens on all ranks: [documents].

    spans [segments], segments [documents], on the CPU: as in Grouping of templates. Values of padding must be 0.
    prefixes [segments], on the CPU: as in Batch of templates; the values of a document's prefix belong to it
    """
    sums = _segment_sums(values[0], spans, segments)
    if prefixes is not None and bool((has_prefix := prefixes[segments] >= 0).any()):
        of_prefixes = _segment_sums(values[0], spans, prefixes[segments].clamp(min=0))
        sums = sums + torch.where(to_device(has_prefix, sums.device), of_prefixes, 0.0)
    return _sum_over_context_ranks(sums)


def last_tokens(hidden: Tensor, ends: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Return the hidden state of each document's last token: [documents, hidden_size] in fp32.

    hidden [local length (/ TP under sequence parallelism), 1, hidden_size]; ends [documents], on the CPU: index
    of the last token in the local row, -1 if another context-parallel rank has it.
    """
    first = _local_start(hidden, sequence_parallel)
    is_local = (ends >= first) & (ends < first + len(hidden))
    indices = torch.where(is_local, ends - first, 0)
    states = hidden[:, 0].index_select(0, to_device(indices, hidden.device)).float()
    states = torch.where(to_device(is_local, hidden.device).unsqueeze(1), states, 0.0)
    return _sum_over_ranks(states, sequence_parallel)


def mean_tokens(
    hidden: Tensor,
    positions: Tensor,
    spans: Tensor,
    segments: Tensor,
    lengths: Sequence[int],
    *,
    sequence_parallel: bool,
) -> Tensor:
    """Return the mean of the hidden states of each document's tokens: [documents, hidden_size] in fp32.

    hidden as in `last_tokens`; positions [local length, 1] within documents; spans and segments as in `sum_documents`;
    lengths: of the documents, without padding.
    """
    first, last = (start := _local_start(hidden, sequence_parallel)), start + len(hidden)
    counts = torch.tensor(lengths, dtype=torch.int64)
    token_counts = torch.zeros_like(spans).index_copy(0, segments, counts)  # tokens per segment, without padding
    is_token = positions[first:last] < to_device(token_counts.repeat_interleave(spans)[first:last, None], hidden.device)
    local_spans = F.pad(spans.cumsum(0), (1, 0)).clamp(first, last).diff()
    sums = _segment_sums(hidden[:, 0].float() * is_token, local_spans, segments)
    return _sum_over_ranks(sums, sequence_parallel) / to_device(counts, hidden.device).unsqueeze(1)


def add_zero_gradient(hidden: Tensor, weight: Tensor | None) -> Tensor:
    """Return `hidden`, and give the unused `weight` a zero gradient: megatron-core waits for every gradient."""
    return hidden if weight is None or not weight.requires_grad else _ZeroGradient.apply(hidden, weight)  # type: ignore[return-value]


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape, weight.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        shape, dtype = ctx.shape
        return grad, grad.new_zeros((), dtype=dtype).expand(shape)


def _local_start(hidden: Tensor, sequence_parallel: bool) -> int:
    """Return the start of this rank's part of the local row."""
    return parallel_state.get_tensor_model_parallel_rank() * len(hidden) if sequence_parallel else 0


def _segment_sums(values: Tensor, spans: Tensor, segments: Tensor) -> Tensor:
    """Sum values [sum of spans, ...] to [documents, ...], without atomic additions. (`unsafe`: no check of lengths.)"""
    sums = torch.segment_reduce(values, "sum", lengths=to_device(spans, values.device), unsafe=True)
    return sums.index_select(0, to_device(segments, values.device))


def _sum_over_ranks(values: Tensor, sequence_parallel: bool) -> Tensor:
    if sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        values = cast(Tensor, reduce_from_tensor_model_parallel_region(values, group=group))
    return _sum_over_context_ranks(values)


def _sum_over_context_ranks(values: Tensor) -> Tensor:
    """Sum values over context-parallel ranks, and gradients in the backward pass."""
    group = cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())
    return differentiable.all_reduce(values, group=group) if group.size() > 1 else values
