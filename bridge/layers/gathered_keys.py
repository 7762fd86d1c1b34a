"""Keys and values of all context-parallel ranks for a kernel of attention.

They are gathered in the forward pass, and again in the backward pass, so that a rank saves its own alone. After Llama 3
(https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import usable
from .packed_seqs import Segments

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # query, key, value -> output, L [heads, tokens]
# grad of output, query, key, value, output, L -> grads of query, key, value
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def gathering(
    forward: Forward, backward: Backward, segments: Segments, group: dist.ProcessGroup
) -> tuple[Forward, Backward]:
    """Return the passes of a kernel for keys and values of this rank, [local tokens, groups, dim], in place of all.

    segments: with a `key_index`
    """

    def gathered_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = _gather(key, value, segments, group)
        return forward(query, keys, values)

    def gathered_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = _gather(key, value, segments, group)
        grad_query, grad_keys, grad_values = backward(grad, query, keys, values, output, log_sum)
        return grad_query, *_reduce(grad_keys, grad_values, len(key), segments, group)

    return gathered_forward, gathered_backward


def _gather(key: Tensor, value: Tensor, segments: Segments, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the segments, [keys, groups, dim], from those of each rank."""
    local = torch.cat((key.flatten(1), value.flatten(1)), dim=1)  # one exchange for both
    gathered = local.new_empty(group.size() * len(local), local.shape[1])
    dist.all_gather_into_tensor(gathered, local, group=group)
    index, width = _key_index(segments), key.shape[1] * key.shape[2]
    if usable(gathered):
        from ..kernels.selected_rows import split_rows

        keys, values = split_rows(gathered, index, width)
    else:
        keys, values = gathered.index_select(0, index).split((width, local.shape[1] - width), dim=1)
    return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])


def _reduce(
    grad_keys: Tensor, grad_values: Tensor, tokens: int, segments: Segments, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the gradients of this rank's keys and values: the reverse of `_gather`. A rank sums its own in fp32.

    tokens: of this rank
    """
    keys, values, total = grad_keys.flatten(1), grad_values.flatten(1), group.size() * tokens
    if usable(keys):
        from ..kernels.selected_rows import sum_rows

        sums = sum_rows(keys, values, *segments.key_copies(total))
    else:
        copies = torch.cat((keys, values), dim=1).float()
        sums = copies.new_zeros(total, copies.shape[1]).index_add_(0, _key_index(segments), copies).to(keys.dtype)
    reduced = keys.new_empty(tokens, sums.shape[1])
    dist.reduce_scatter_tensor(reduced, sums, group=group)
    key, value = reduced.split((keys.shape[1], values.shape[1]), dim=1)
    return key.unflatten(1, grad_keys.shape[1:]), value.unflatten(1, grad_values.shape[1:])


def _key_index(segments: Segments) -> Tensor:
    assert segments.key_index is not None
    return segments.key_index
