"""Whole documents of a row: the hidden states of their last tokens, or means; scores; sums of their tokens' numbers.

Under context parallelism a rank has a part of each, under sequence parallelism a part of the row; what is returned here
is the same on every rank of both. Each tensor-parallel rank has the whole loss, each context-parallel rank a share of
it: gradients are summed over the latter, and never over the former.
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
    """The matrix behind a model that scores documents: `score` of transformers' sequence classification."""

    def __init__(self, labels: int, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(labels, hidden_size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """[documents, hidden_size] -> [documents, labels], in fp32."""
        return F.linear(hidden.float(), self.weight.float())


def sum_documents(values: Tensor, spans: Tensor, segments: Tensor) -> Tensor:
    """Sums of `values` [1, local length] over each document's tokens, on whatever rank these are: [documents].

    spans [segments], segments [documents], on the CPU: as templates' Grouping. What is padding must be 0.
    """
    return _over_context(_sums(values[0], spans, segments))


def last_tokens(hidden: Tensor, ends: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Return the hidden state of each document's last token: [documents, hidden_size] in fp32.

    hidden [local length (/ TP under sequence parallelism), 1, hidden_size]; ends [documents], on the CPU: where in the
    local row the last token is, -1 where another context-parallel rank has it.
    """
    first = _first(hidden, sequence_parallel)
    is_local = (ends >= first) & (ends < first + len(hidden))
    places = torch.where(is_local, ends - first, 0)
    states = hidden[:, 0].index_select(0, to_device(places, hidden.device)).float()
    states = torch.where(to_device(is_local, hidden.device).unsqueeze(1), states, 0.0)
    return _over_ranks(states, sequence_parallel)


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

    hidden as in `last_tokens`; positions [local length, 1] within documents; spans and segments as in `document_sums`;
    lengths: of the documents, without padding.
    """
    first, last = (at := _first(hidden, sequence_parallel)), at + len(hidden)
    counts = torch.tensor(lengths, dtype=torch.int64)
    within = torch.zeros_like(spans).index_copy(0, segments, counts)  # the positions of a segment that are no padding
    real = positions[first:last] < to_device(within.repeat_interleave(spans)[first:last, None], hidden.device)
    here = F.pad(spans.cumsum(0), (1, 0)).clamp(first, last).diff()
    sums = _sums(hidden[:, 0].float() * real, here, segments)
    return _over_ranks(sums, sequence_parallel) / to_device(counts, hidden.device).unsqueeze(1)


def unused(hidden: Tensor, weight: Tensor | None) -> Tensor:
    """`hidden`, such that `weight`, which is not used, has a gradient of 0: megatron-core waits for every gradient."""
    return hidden if weight is None or not weight.requires_grad else _Unused.apply(hidden, weight)  # type: ignore[return-value]


class _Unused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape, weight.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        shape, dtype = ctx.shape
        return grad, grad.new_zeros((), dtype=dtype).expand(shape)


def _first(hidden: Tensor, sequence_parallel: bool) -> int:
    """Return the start of this rank's part of the local row."""
    return parallel_state.get_tensor_model_parallel_rank() * len(hidden) if sequence_parallel else 0


def _sums(values: Tensor, spans: Tensor, segments: Tensor) -> Tensor:
    """[sum of spans, ...] -> [documents, ...], without atomic additions. (`unsafe`: lengths are not looked into.)"""
    sums = torch.segment_reduce(values, "sum", lengths=to_device(spans, values.device), unsafe=True)
    return sums.index_select(0, to_device(segments, values.device))


def _over_ranks(values: Tensor, sequence_parallel: bool) -> Tensor:
    if sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        values = cast(Tensor, reduce_from_tensor_model_parallel_region(values, group=group))
    return _over_context(values)


def _over_context(values: Tensor) -> Tensor:
    """Sums over context-parallel ranks, and of their gradients as well."""
    group = cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())
    return differentiable.all_reduce(values, group=group) if group.size() > 1 else values
