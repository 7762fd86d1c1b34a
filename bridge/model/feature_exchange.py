"""Exchange of the features of media, and of their gradients, between the ranks of a replica."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime
from ..layers.packed_seqs import to_device
from .media_inputs import MediaInputs


class Exchange(NamedTuple):
    """Exchange of one micro batch's features between the ranks of a replica."""

    sends: list[Tensor]  # for each rank: [n] int64, indices of this rank's features that it needs
    receives: list[Tensor]  # from each rank: [n] int64, positions of its features in this rank's hidden states


class FeatureExchange:
    """Exchange between the ranks that encode media and those that hold their tokens, on each pipeline stage."""

    def __init__(
        self,
        levels: int,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        stages: Sequence[Sequence[int]],
    ):
        """levels: of features. stages: the numbers of the layers of each pipeline stage, from 1."""
        self.dtype = config.params_dtype
        self.tensor, self.context = groups.tp.size(), groups.cp.size()
        self.sequence_parallel = config.sequence_parallel and self.tensor > 1
        self.replica = _replica_group(groups)
        self.rank, self.ranks = self.replica.rank(), self.replica.size()
        assert self.rank == groups.tp.rank() + self.tensor * (groups.cp.rank() + self.context * groups.pp.rank())
        # Leaves' gradients are of a loss times the ranks of data and context parallelism, whose gradients are averaged;
        # those of the tower are averaged over all ranks.
        self.gradient_scale = dist.get_world_size() / groups.dp_cp.size()
        deep = range(1, levels)
        self.levels = [
            [level for level in (0, *deep) if (level == 0 and stage == 0) or level in layers]
            for stage, layers in enumerate(stages)
        ]

    def plan(self, batch: MediaInputs) -> Exchange:
        counts = batch.counts.numpy()
        encoders, uses = batch.encoders.numpy(), batch.uses.numpy()
        starts = np.empty_like(counts)  # index of each medium's first feature among those of its owner
        for owner in range(self.ranks):
            owned_counts = counts[encoders == owner]
            starts[encoders == owner] = owned_counts.cumsum() - owned_counts
        counts = counts[uses]
        # NumPy's repeat: torch's starts a thread per core, and took 77 to 171 ms a step beside data workers (16 cores).
        owners = torch.from_numpy(np.repeat(encoders[uses], counts))
        offsets = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        indices = torch.from_numpy(np.repeat(starts[uses], counts) + offsets)  # a token's feature, among its owner's
        rows, positions = batch.positions // batch.local_length, batch.positions % batch.local_length
        length = batch.local_length // self.tensor if self.sequence_parallel else batch.local_length
        tensor_ranks, hidden = positions // length, positions % length * batch.rows + rows

        def is_needed(rank: int) -> Tensor:
            needed = batch.context_ranks == rank // self.tensor % self.context
            return needed & (tensor_ranks == rank % self.tensor) if self.sequence_parallel else needed

        own_needed, is_own = is_needed(self.rank), owners == self.rank
        return Exchange(
            [indices[is_own & is_needed(rank)] for rank in range(self.ranks)],
            [hidden[(owners == rank) & own_needed] for rank in range(self.ranks)],
        )

    def _takes(self, rank: int, level: int) -> bool:
        return level in self.levels[rank // (self.tensor * self.context)]

    def send(self, exchange: Exchange, features: Tensor) -> dict[int, Tensor]:
        """Return the features of this rank's tokens by level: [tokens, output_size]."""
        leaves = {}
        for level in range(len(features)):
            takers = [rank for rank in range(self.ranks) if self._takes(rank, level)]
            index = to_device(torch.cat([exchange.sends[rank] for rank in takers]), features.device)
            rows = features[level].index_select(0, index)
            if self.ranks > 1:
                sent = [len(exchange.sends[rank]) if rank in takers else 0 for rank in range(self.ranks)]
                received = [len(part) if self.rank in takers else 0 for part in exchange.receives]
                rows = self._all_to_all(rows, sent, received)
            if self.rank in takers:
                leaves[level] = rows
        return leaves

    def send_back(self, exchange: Exchange, leaves: dict[int, Tensor], shape: Sequence[int]) -> Tensor:
        """Return the gradients of this rank's features from those of all leaves.

        shape: [levels, features, output_size] of the gradients, which are fp32
        """
        gradients = torch.zeros(*shape, device=runtime.device())
        for level in range(shape[0]):
            # Without sequence parallelism tensor-parallel ranks have the same gradient: the first one sends it.
            takers = [
                rank
                for rank in range(self.ranks)
                if self._takes(rank, level) and (self.sequence_parallel or rank % self.tensor == 0)
            ]
            leaf = leaves.get(level)
            rows = torch.empty(0, shape[2], dtype=self.dtype, device=runtime.device())
            if leaf is not None and self.rank in takers:
                rows = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if self.ranks > 1:
                sent = [len(part) if self.rank in takers else 0 for part in exchange.receives]
                received = [len(exchange.sends[rank]) if rank in takers else 0 for rank in range(self.ranks)]
                rows = self._all_to_all(rows, sent, received)
            index = torch.cat([exchange.sends[rank] for rank in takers])
            gradients[level].index_add_(0, to_device(index, rows.device), rows.float())
        return gradients.mul_(self.gradient_scale)

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        output = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=self.replica)
        return output


def _replica_group(groups: ProcessGroupCollection) -> ProcessGroup:
    """Return the group of this rank's replica: the ranks with the same data-parallel index. Every rank calls this."""
    indices: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(indices, groups.dp.rank())
    replicas = [
        dist.new_group([rank for rank, other in enumerate(indices) if other == index]) for index in sorted(set(indices))
    ]
    return cast(ProcessGroup, replicas[groups.dp.rank()])
