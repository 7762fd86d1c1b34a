"""Exchange of the features of media, and of their gradients, between the ranks of a replica.

All levels, and the micro batches that are encoded together, are in one message: each has a fixed cost on the host.
"""

from collections.abc import Sequence
from itertools import accumulate
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
        """levels: of features. stages: the numbers of each pipeline stage's layers, from 1, and 0 of an embedding."""
        self.dtype = config.params_dtype
        self.tensor, self.context = groups.tp.size(), groups.cp.size()
        self.sequence_parallel = config.sequence_parallel and self.tensor > 1
        self.replica = _replica_group(groups)
        self.rank, self.ranks = self.replica.rank(), self.replica.size()
        assert self.rank == groups.tp.rank() + self.tensor * (groups.cp.rank() + self.context * groups.pp.rank())
        # Leaves' gradients are of a loss times the ranks of data and context parallelism, whose gradients are averaged;
        # those of the tower are averaged over all ranks.
        self.gradient_scale = dist.get_world_size() / groups.dp_cp.size()
        # Levels that the same ranks take, with these ranks: they are sent together.
        levels_of: dict[tuple[int, ...], list[int]] = {}
        for level in range(levels):
            ranks = range(self.ranks)
            takers = tuple(rank for rank in ranks if level in stages[rank // (self.tensor * self.context)])
            levels_of.setdefault(takers, []).append(level)
        self._routes = [(levels, takers) for takers, levels in levels_of.items()]

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

    def send(self, exchanges: Sequence[Exchange], features: Sequence[Tensor]) -> list[dict[int, Tensor]]:
        """Return the features of this rank's tokens in each of some micro batches, by level: [tokens, output_size].

        features: of this rank's media in each micro batch, [levels, features, output_size]
        """
        sources = torch.cat(list(features), dim=1)
        counts = [part.shape[1] for part in features]
        leaves: list[dict[int, Tensor]] = [{} for _ in exchanges]
        for levels, takers in self._routes:
            index = to_device(_rows_of(exchanges, counts, takers), sources.device)
            rows = torch.stack([sources[level].index_select(0, index) for level in levels], dim=1)
            if self.ranks > 1:
                rows = self._all_to_all(rows, *self._sizes(exchanges, takers))
            if self.rank not in takers:
                continue
            pieces = rows.split([len(one.receives[rank]) for rank in range(self.ranks) for one in exchanges])
            for number, batch_leaves in enumerate(leaves):
                batch_rows = torch.cat(pieces[number :: len(exchanges)])
                batch_leaves |= zip(levels, batch_rows.unbind(1), strict=True)
        return leaves

    def send_back(
        self,
        exchanges: Sequence[Exchange],
        leaves: Sequence[dict[int, Tensor]],
        counts: Sequence[int],
        shape: tuple[int, int],
    ) -> Tensor:
        """Return the gradients of this rank's features from those of all leaves: [levels, features, output_size] fp32.

        counts: of this rank's features in each micro batch. shape: levels and output_size
        """
        gradients = torch.zeros(shape[0], sum(counts), shape[1], device=runtime.device())
        for levels, takers in self._routes:
            # Without sequence parallelism tensor-parallel ranks have the same gradient: the first one sends it.
            senders = [rank for rank in takers if self.sequence_parallel or rank % self.tensor == 0]
            rows = torch.empty(0, len(levels), shape[1], dtype=self.dtype, device=runtime.device())
            if self.rank in senders:
                rows = self._leaf_gradients(exchanges, leaves, levels)
            if self.ranks > 1:
                sent, received = self._sizes(exchanges, senders)
                rows = self._all_to_all(rows, received, sent)
            index = to_device(_rows_of(exchanges, counts, senders), rows.device)
            for number, level in enumerate(levels):
                gradients[level].index_add_(0, index, rows[:, number].float())
        return gradients.mul_(self.gradient_scale)

    def _leaf_gradients(
        self, exchanges: Sequence[Exchange], leaves: Sequence[dict[int, Tensor]], levels: list[int]
    ) -> Tensor:
        """Return the gradients of leaves in the order in which their features came: [tokens, levels, output_size]."""
        pieces = []
        for exchange, batch_leaves in zip(exchanges, leaves, strict=True):
            parts = [batch_leaves[level] for level in levels]
            grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in parts]
            pieces.append(torch.stack(grads, dim=1).split([len(part) for part in exchange.receives]))
        return torch.cat([piece for by_batch in zip(*pieces, strict=True) for piece in by_batch])

    def _sizes(self, exchanges: Sequence[Exchange], takers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the rows that this rank sends to each rank, and receives from each, if these ranks take features."""
        takes = self.rank in takers
        ranks = range(self.ranks)
        sent = [sum(len(one.sends[rank]) for one in exchanges) if rank in takers else 0 for rank in ranks]
        return sent, [sum(len(one.receives[rank]) for one in exchanges) if takes else 0 for rank in ranks]

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        output = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=self.replica)
        return output


def _rows_of(exchanges: Sequence[Exchange], counts: Sequence[int], ranks: Sequence[int]) -> Tensor:
    """Return the indices of the features that go to some ranks, among those of all micro batches: by rank, then batch.

    counts: of this rank's features in each micro batch
    """
    starts = [0, *accumulate(counts)]
    return torch.cat([
        one.sends[rank] + start for rank in ranks for one, start in zip(exchanges, starts, strict=False)
    ])  # fmt: skip


def _replica_group(groups: ProcessGroupCollection) -> ProcessGroup:
    """Return the group of this rank's replica: the ranks with the same data-parallel index. Every rank calls this."""
    indices: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(indices, groups.dp.rank())
    replicas = [
        dist.new_group([rank for rank, other in enumerate(indices) if other == index]) for index in sorted(set(indices))
    ]
    return cast(ProcessGroup, replicas[groups.dp.rank()])
