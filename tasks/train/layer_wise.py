"""Whole parameters divided among data-parallel ranks: each rank updates its own, and sends them to the others.

An optimizer that needs whole matrices can so share its state and work (--optimizer dist_muon).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ...bridge.model.model import Model


class ParameterOwners:
    """Owner of each trained parameter: a rank of its data-parallel group, the same on all tensor-parallel ranks."""

    def __init__(self, model: Model):
        dense: list[Tensor] = []
        experts: list[Tensor] = []
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    (dense if getattr(parameter, "allreduce", True) else experts).append(parameter)
        # By group: the parameters of each of its ranks.
        self._owned = [
            (group, _divide(parameters, group.size()))
            for group, parameters in ((model.groups.dp_cp, dense), (model.groups.expt_dp, experts))
            if parameters
        ]

    @contextmanager
    def only_own(self) -> Iterator[None]:
        """Freeze the parameters of other ranks within the context, so that an optimizer gets this rank's."""
        others = [
            parameter
            for group, owned in self._owned
            for rank, parameters in enumerate(owned)
            if rank != group.rank()
            for parameter in parameters
        ]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    @torch.no_grad()
    def send(self) -> None:
        """Send each parameter from its owner to the others. Every rank calls this."""
        for group, owned in self._owned:
            if group.size() == 1:
                continue
            for rank, parameters in enumerate(owned):
                for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
                    _broadcast([p for p in parameters if p.dtype == dtype], rank, group)


def _divide(parameters: list[Tensor], ranks: int) -> list[list[Tensor]]:
    """Divide parameters among ranks, so that each has about as many elements; the largest go first."""
    owned: list[list[Tensor]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
        rank = sizes.index(min(sizes))
        owned[rank].append(parameter)
        sizes[rank] += parameter.numel()
    return owned


def _broadcast(parameters: list[Tensor], rank: int, group: dist.ProcessGroup) -> None:
    flat = torch.cat([parameter.detach().view(-1) for parameter in parameters])
    dist.broadcast(flat, dist.get_global_rank(group, rank), group)
    if rank != group.rank():
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, values in zip(parameters, flat.split(sizes), strict=True):
            parameter.detach().view(-1).copy_(values)
