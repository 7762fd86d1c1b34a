"""Keys and values of all context-parallel ranks for a kernel of attention.

They are gathered in the forward pass, and again in the backward pass, so that a rank saves its own alone. After Llama 3
(https://arxiv.org/abs/2407.21783, section 3.3.2).
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # query, key, value -> output, L [heads, tokens]
# grad of output, query, key, value, output, L -> grads of query, key, value
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def gathering(
    forward: Forward, backward: Backward, index: Tensor, group: dist.ProcessGroup
) -> tuple[Forward, Backward]:
    """Return the passes of a kernel for keys and values of this rank, [local tokens, groups, dim], in place of all.

    index: positions of a segment's keys in the gathered tokens, as `Segments.key_index`
    """

    def gathered_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = _gather((key, value), index, group)
        return forward(query, keys, values)

    def gathered_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = _gather((key, value), index, group)
        grad_query, *grads = backward(grad, query, keys, values, output, log_sum)
        grad_key, grad_value = _reduce(grads, len(key), index, group)
        return grad_query, grad_key, grad_value

    return gathered_forward, gathered_backward


def _gather(states: Sequence[Tensor], index: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the states of all ranks at `index`: [local tokens, groups, dim] each -> [len(index), groups, dim]."""
    local = torch.cat(tuple(states), dim=-1)  # one exchange for all
    gathered = local.new_empty(group.size() * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local, group=group)
    return [part.index_select(0, index) for part in gathered.split([x.shape[-1] for x in states], dim=-1)]


def _reduce(grads: Sequence[Tensor], tokens: int, index: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the gradients of this rank's keys and values: the reverse of `_gather`. A rank sums its own in fp32.

    tokens: of this rank
    """
    first, sizes = grads[0], [grad.shape[-1] for grad in grads]
    shape = group.size() * tokens, first.shape[1], sum(sizes)
    sums = torch.zeros(shape, dtype=torch.float32, device=first.device)
    for part, grad in zip(sums.split(sizes, dim=-1), grads, strict=True):
        part.index_add_(0, index, grad.float())
    reduced = first.new_empty(tokens, *shape[1:])
    dist.reduce_scatter_tensor(reduced, sums.to(first.dtype), group=group)
    return list(reduced.split(sizes, dim=-1))
