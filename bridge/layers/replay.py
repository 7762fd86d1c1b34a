"""Router replay: record the choice of experts in one pass, and repeat it in another.

The choice depends on small differences, between engine and trainer and between two passes of the trainer. A repeated
choice is the recorded one; the weights are computed again, so that gradients reach the router
(https://arxiv.org/abs/2510.11370).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..mapping.local_params import decoder_layers
from .packed_seqs import to_device


class Replay:
    """The recorded or repeated choices of one router.

    Experts are set for the next call alone, and for its recomputation in the backward pass. Backward passes come in the
    order of the forward passes: the first call that waits to be recomputed is the next one that is.
    """

    def __init__(self) -> None:
        self.records = False
        self._next: Tensor | None = None
        self._waiting: deque[Tensor | None] = deque()  # calls that will be recomputed
        self._records: list[Tensor] = []

    def set_experts(self, experts: Tensor) -> None:
        """Set the next call's experts [tokens, topk], of any integer type; below 0 the router chooses."""
        self._next = experts

    def pop_experts(self, *, training: bool) -> Tensor | None:
        """Return the experts of this call."""
        if training and torch.is_grad_enabled() and self._waiting:
            return self._waiting.popleft()
        experts, self._next = self._next, None
        if training and not torch.is_grad_enabled():  # the first pass of a recomputed layer
            self._waiting.append(experts)
        return experts

    def record(self, experts: Tensor) -> None:
        """Record the experts of a call, [tokens, topk]."""
        if self.records:
            self._records.append(experts.int())  # NCCL has no type that is shorter

    def pop_records(self) -> list[Tensor]:
        """Return and forget the experts of each call, int32 [tokens, topk]."""
        records, self._records = self._records, []
        return records


def replay_choice(chosen: Tensor, replayed: Tensor | None) -> Tensor:
    """Return the replayed experts, and where there are none the router's choice. Both [tokens, topk]."""
    if replayed is None:
        return chosen
    replayed = replayed.to(chosen.dtype)
    return torch.where(replayed < 0, chosen, replayed)


class ReplayedRouter(Protocol):
    """A router that replays choices: layers/router.py."""

    config: TransformerConfig
    weight: nn.Parameter
    training: bool
    replay: Replay


class CoreReplay:
    """Adapter of `Replay` to megatron-core's top-k function (RouterReplay.get_replay_topk)."""

    def __init__(self, router: ReplayedRouter):
        self._router = router

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their scores, both [tokens, topk], of scores [tokens, experts]."""
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        replay: Replay = self._router.replay
        replayed = replay.pop_experts(training=self._router.training)
        if replayed is None and not replay.records:
            return values, chosen
        if not torch.is_grad_enabled():  # without gradients megatron-core returns them unsorted
            chosen = chosen.gather(1, values.argsort(dim=1, descending=True, stable=True))
        experts = replay_choice(chosen, replayed)
        replay.record(experts)
        return scores.gather(1, experts), experts


def find_routers(chunk: nn.Module) -> dict[int, ReplayedRouter]:
    """Return the routers of a chunk (bare or wrapped) by the global number of their layer, from 0."""
    layers = decoder_layers(cast(GPTModel, getattr(chunk, "module", chunk)))
    routers = {layer.layer_number - 1: getattr(layer.mlp, "router", None) for layer in layers}
    return {number: router for number, router in routers.items() if router is not None}


def replay_experts(chunk: nn.Module, experts: Tensor) -> None:
    """Set the experts of the next forward pass through a chunk: [local length, layers, topk] of all the model's layers.

    Under sequence parallelism a router has a part of the tokens.
    """
    routers = find_routers(chunk)
    if not routers:  # a pipeline stage of dense layers
        return
    first = next(iter(routers.values()))
    if first.config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        experts = experts.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    by_layer = to_device(experts[:, list(routers)].transpose(0, 1).contiguous(), first.weight.device)
    for router, layer_experts in zip(routers.values(), by_layer, strict=True):
        router.replay.set_experts(layer_experts)


@contextmanager
def record_experts(chunks: Sequence[nn.Module]) -> Iterator[Callable[[], dict[int, list[Tensor]]]]:
    """Record the routers' choices, and yield a function that returns and forgets them.

    By global layer number, for each layer of this pipeline stage: the experts of one micro batch after the other, int16
    [local length, topk] on the CPU.
    """
    routers = {number: router for chunk in chunks for number, router in find_routers(chunk).items()}
    for router in routers.values():
        router.replay.records = True

    def pop_records() -> dict[int, list[Tensor]]:
        return {number: [_gather(r, x) for x in r.replay.pop_records()] for number, r in sorted(routers.items())}

    try:
        yield pop_records
    finally:
        for router in routers.values():
            router.replay.records = False
            router.replay.pop_records()


def _gather(router: ReplayedRouter, experts: Tensor) -> Tensor:
    """Gather the experts of the tokens that sequence parallelism has split over ranks."""
    if router.config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        parts = [torch.empty_like(experts) for _ in range(ranks)]
        torch.distributed.all_gather(
            parts, experts.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
        )
        experts = torch.cat(parts)
    return experts.short().cpu()
