"""Token dispatcher over memory that the GPUs of one host share (kernels/exchange.py)."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..kernels.exchange import RegionLayout, Regions, add_sums, place, pull, stage, stage_sums

SPARE_ROWS = 1 / 16  # part of the last number of rows by which the next may be larger without another copy
ROWS_GRANULE = 1024  # numbers of rows are rounded up to it, so that the allocator meets few sizes


class PeerMemory(Protocol):
    """Memory of the ranks of a group that every one of them reads."""

    rank: int
    ranks: int

    def allocate(self, size: int) -> list[int]:
        """Replace the memory by `size` bytes a rank; return each rank's address. Collective."""
        ...

    def barrier(self) -> None:
        """Have later kernels of this rank wait for all earlier ones of every rank. Collective."""
        ...

    def maximum(self, number: int) -> int:
        """Return the largest number of the ranks. Collective."""
        ...


class SymmetricMemory:
    """`PeerMemory` of GPUs with access to each other's memory."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.tensor = self.handle = None

    @classmethod
    def open(cls, group: dist.ProcessGroup) -> "SymmetricMemory | None":
        """Return the memory of a group; None where a rank cannot read another's. Collective."""
        memory = cls(group)
        if not torch.cuda.is_available() or not memory.all_agree(memory._sees_all_gpus()):
            return None
        try:
            memory.allocate(4096)
            assert memory.tensor is not None
            memory.tensor.fill_(memory.rank)
            has_memory = True
        except RuntimeError:
            has_memory = False
        if not memory.all_agree(has_memory):
            return None
        memory.barrier()
        return memory if memory.all_agree(memory._reads_all_ranks()) else None

    def _sees_all_gpus(self) -> bool:
        """Return whether the ranks have GPUs of their own on this host, which this rank's GPU can read.

        Machines whose GPUs read each other wrongly have NCCL_P2P_DISABLE=1 set: it counts here too.
        """
        this = torch.cuda.current_device()
        indices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        uuids: list[str] = [""] * self.ranks
        dist.all_gather_object(uuids, str(torch.cuda.get_device_properties(this).uuid), self.group)
        peers = [indices.get(uuid) for uuid in uuids]
        is_allowed = os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
        return (
            is_allowed
            and len(set(peers)) == self.ranks
            and all(
                peer is not None and (peer == this or torch.cuda.can_device_access_peer(this, peer)) for peer in peers
            )
        )

    def _reads_all_ranks(self) -> bool:
        assert self.handle is not None
        firsts = [self.handle.get_buffer(rank, (1,), torch.uint8) for rank in range(self.ranks)]
        return [int(first) for first in firsts] == list(range(self.ranks))

    def all_agree(self, is_true: bool) -> bool:
        """Return whether it is true on all ranks. Collective."""
        return self.maximum(int(not is_true)) == 0

    def allocate(self, size: int) -> list[int]:
        from torch._C._distributed_c10d import _SymmetricMemory

        # No rank may still read what is freed here.
        torch.cuda.synchronize()
        dist.barrier(self.group)
        self.handle = self.tensor = None
        device = torch.device("cuda", torch.cuda.current_device())
        self.tensor = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, self.group.group_name)
        self.handle = _SymmetricMemory.rendezvous(self.tensor)
        return [self.handle.get_buffer(rank, (size,), torch.uint8).data_ptr() for rank in range(self.ranks)]

    def barrier(self) -> None:
        assert self.handle is not None
        self.handle.barrier()

    def maximum(self, number: int) -> int:
        largest = torch.tensor(number, device="cuda")
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        return int(largest)


@dataclass
class RowPlacement:
    """Placement of all ranks' tokens for this rank's experts."""

    layout: RegionLayout
    row_map: Tensor  # int32 [ranks, capacity, topk]: see kernels/exchange.py
    counts: Tensor  # int32 [experts of a rank], rows per expert
    experts: Tensor  # int32 [tokens, topk], of this rank's tokens
    rows: int
    tokens: int  # the largest number of a rank


class PeerExchange:
    """Exchanges of the ranks of a group, one after another on one stream, in the same order on every rank.

    Each exchange has one barrier: a rank writes to its region, waits at the barrier, and reads the regions of all
    ranks. Two halves of the memory serve in turn. A rank that writes to a half for exchange n + 2 has passed the
    barrier of exchange n + 1, at which every rank arrives after its reads of exchange n. So nothing is overwritten that
    is still to be read, whichever layers, micro batches, or recomputed forward passes the exchanges belong to.

    The memory grows when a rank has more tokens than it holds. Each rank writes its number of tokens before the
    barrier. Thus all ranks see that the memory is too small, and repeat the exchange together.
    """

    def __init__(self, memory: PeerMemory, device: torch.device):
        self.memory, self.device = memory, device
        self.size, self.turn = 0, 0  # bytes of half the memory; half in use
        self.addresses: list[Tensor] = []  # for each half: int64 [ranks]
        self.summary = torch.empty(2, dtype=torch.int32, pin_memory=device.type == "cuda")

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, local_experts: int, expected: int
    ) -> tuple[Tensor, Tensor, RowPlacement]:
        """Return the rows of this rank's experts, sorted by expert, rank and token, and their weights.

        x [tokens, width]; experts and weights [tokens, topk]; local_experts: number per rank; expected: number of rows
        that is probably enough. The host waits for the number of rows while the GPU copies them. If there are more than
        expected, they are copied again.
        """
        x, experts, weights = x.contiguous(), experts.to(torch.int32).contiguous(), weights.contiguous()
        form = self._form(x, weights)
        if not self.size:
            self._grow(form, self.memory.maximum(len(x)))
        while True:
            regions = self._next_regions(form)
            stage(regions, x, experts, weights)
            self.memory.barrier()
            row_map, counts, summary = place(regions, local_experts)
            wait = self._copy_summary(summary)
            rows, row_weights = x.new_empty(expected, x.shape[1]), weights.new_empty(expected)
            pull(regions, row_map, regions.layout.capacity, rows, row_weights)
            wait()
            total, tokens = self.summary.tolist()
            if tokens <= regions.layout.capacity:
                break
            self._grow(form, tokens)
        if total > expected:
            rows, row_weights = x.new_empty(total, x.shape[1]), weights.new_empty(total)
            pull(regions, row_map, tokens, rows, row_weights)
        placement = RowPlacement(form, row_map, counts, experts, total, tokens)
        return rows.resize_(total, x.shape[1]), row_weights.resize_(total), placement

    def spread(self, x: Tensor, placement: RowPlacement) -> Tensor:
        """Copy tokens to the rows of their experts as in the dispatch: x [tokens, width] -> [rows, width]."""
        regions = self._next_regions(placement.layout)
        stage(regions, x)
        self.memory.barrier()
        rows = x.new_empty(placement.rows, x.shape[1])
        pull(regions, placement.row_map, placement.tokens, rows)
        return rows

    def combine(
        self, rows: Tensor, placement: RowPlacement, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums of the tokens' rows, [tokens, width], and the tokens' weights, [tokens, topk].

        rows [rows, width] and weights [rows] in the order of the dispatch, of its types
        """
        rows, weights = rows.contiguous(), None if weights is None else weights.contiguous()
        assert rows.element_size() == placement.layout.row_size
        regions = self._next_regions(placement.layout)
        stage_sums(regions, placement.row_map, placement.tokens, rows, weights)
        self.memory.barrier()
        return add_sums(regions, placement.row_map, placement.experts, len(placement.counts), rows, weights)

    def _form(self, x: Tensor, weights: Tensor) -> RegionLayout:
        sizes = x.element_size(), weights.element_size()
        return RegionLayout(self.memory.ranks, weights.shape[1], x.shape[1], *sizes)

    def _next_regions(self, form: RegionLayout) -> Regions:
        self.turn = 1 - self.turn
        return Regions(self.addresses[self.turn], self.memory.rank, form.fitting(self.size))

    def _grow(self, form: RegionLayout, tokens: int) -> None:
        self.size = max(self.size, form.with_capacity(max(tokens, 1)).size)
        starts = self.memory.allocate(2 * self.size)
        self.addresses = [
            torch.tensor([start + half * self.size for start in starts], device=self.device) for half in range(2)
        ]

    def _copy_summary(self, summary: Tensor) -> Callable[[], object]:
        """Begin to copy the summary of `place` to the host; return what waits for it."""
        self.summary.copy_(summary, non_blocking=True)
        if self.device.type != "cuda":
            return lambda: None
        copied = torch.cuda.Event()
        copied.record()
        return copied.synchronize


_exchanges: dict[
    str, tuple[dist.ProcessGroup, PeerExchange | None]
] = {}  # keyed by group name, which later groups may reuse


def exchange_of(group: dist.ProcessGroup) -> PeerExchange | None:
    """Return the exchange of a group; None where a rank cannot read another's memory. Collective."""
    opened_for, exchange = _exchanges.get(group.group_name, (None, None))
    if opened_for is not group:
        memory = SymmetricMemory.open(group)
        exchange = memory and PeerExchange(memory, torch.device("cuda", torch.cuda.current_device()))
        _exchanges[group.group_name] = group, exchange
    return exchange


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weights: Tensor, experts: Tensor, exchange: PeerExchange, local_experts: int, expected: int
    ) -> tuple[Tensor, Tensor, RowPlacement]:
        rows, row_weights, placement = exchange.dispatch(x, experts, weights, local_experts, expected)
        ctx.exchange, ctx.placement = exchange, placement
        return rows, row_weights, placement

    @staticmethod
    def backward(ctx, grad_rows: Tensor, grad_weights: Tensor, _) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_x, grad_weights = ctx.exchange.combine(grad_rows, ctx.placement, grad_weights)
        return grad_x, grad_weights, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, exchange: PeerExchange, placement: RowPlacement) -> Tensor:
        ctx.exchange, ctx.placement = exchange, placement
        return exchange.combine(rows, placement)[0]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.spread(grad, ctx.placement), None, None


class PeerDispatcher(MoETokenDispatcher):
    """Dispatcher that reads tokens from other GPUs, and sums from their experts' GPUs; it drops no tokens.

    It takes the indices of each token's experts instead of a routing map over all experts.
    """

    def __init__(self, exchange: PeerExchange, experts: int, config: TransformerConfig, groups: ProcessGroupCollection):
        super().__init__(config, groups)
        self.exchange, self.local_experts = exchange, experts
        self.last_rows: int | None = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens as a matrix, and their weights.

        hidden_states: [..., hidden_size]
        routing_map, probs: [tokens, topk], the experts of each token and their weights
        """
        self.hidden_shape, self.experts = hidden_states.shape, routing_map
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return hidden_states.flatten(0, -2), probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank's experts, sorted by expert, and their weights."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        rows = probs.numel() if self.last_rows is None else self.last_rows  # as if experts had equal numbers of tokens
        expected = -(-int(rows * (1 + SPARE_ROWS)) // ROWS_GRANULE) * ROWS_GRANULE
        outputs = _Dispatch.apply(hidden_states, probs, self.experts, self.exchange, self.local_experts, expected)
        rows, weights, self.placement = cast(tuple[Tensor, Tensor, RowPlacement], outputs)
        self.last_rows = self.placement.rows
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows, the number of rows per expert, and the weights."""
        return hidden_states, self.placement.counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' rows."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of each token's rows, [tokens, hidden_size]."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        output = cast(Tensor, _Combine.apply(hidden_states, self.exchange, self.placement))
        del self.placement, self.experts  # autograd keeps what the backward pass needs
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        return output

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sums in the shape of the layer's input."""
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + cast(Tensor, self.shared_experts.get_output())
        return output
