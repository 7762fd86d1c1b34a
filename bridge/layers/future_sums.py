"""Discounted sums over the later tokens of each document, also where context parallelism splits it."""

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from .packed_seqs import to_device

BLOCK = 128  # tokens whose sums are one matrix product


@torch.no_grad()
def future_sums(values: Tensor, spans: Tensor, decay: float) -> Tensor:
    """Return at each token the sum over itself and the later ones of its segment, of values x decay^distance.

    values [local length] fp32, 0 on padding; spans [segments], on the CPU: local lengths of the row's segments, as in
    Grouping of templates. No gradients.
    """
    group = cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())
    if group.size() == 1:
        return _segment_future_sums(values, spans, decay)
    places = to_device(_places(spans, group.rank(), group.size()), values.device)
    row = values.new_zeros(len(values) * group.size()).index_copy(0, places, values)
    dist.all_reduce(row, group=group)
    return _segment_future_sums(row, spans * group.size(), decay)[places]


def _places(spans: Tensor, rank: int, size: int) -> Tensor:
    """Return the place of each local token in the full row: of each segment a rank has two of 2 x size chunks."""
    starts = F.pad(spans.cumsum(0), (1, 0))[:-1].repeat_interleave(spans)
    offsets, chunks = torch.arange(len(starts)) - starts, (spans // 2).repeat_interleave(spans)
    second = (2 * size - 2 - rank) * chunks + offsets
    return starts * size + torch.where(offsets < chunks, rank * chunks + offsets, second)


def _segment_future_sums(values: Tensor, spans: Tensor, decay: float) -> Tensor:
    longest = int(spans.max())
    is_token = to_device(torch.arange(longest) < spans[:, None], values.device)
    padded = values.new_zeros(len(spans), longest).masked_scatter(is_token, values)
    blocks = F.pad(padded, (0, -longest % BLOCK)).unflatten(1, (-1, BLOCK))
    distances = torch.arange(BLOCK, device=values.device)
    later = distances[:, None] - distances  # [later token, token]
    sums = blocks @ torch.where(later >= 0, decay ** later.clamp(min=0).float(), 0.0)
    carried = decay ** (BLOCK - distances).float()
    for block in range(blocks.shape[1] - 2, -1, -1):
        sums[:, block] += sums[:, block + 1, :1] * carried
    return sums.flatten(1)[:, :longest][is_token]
