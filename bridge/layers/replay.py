"""Router replay: records the choice of experts in one pass and repeats it in another.

Small numerical differences between engine and trainer, or between two passes of the trainer, change the choice. Replay
uses the recorded experts and computes their weights again, so that gradients reach the router
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
from torch.distributed import ProcessGroup

from ..mapping.local_params import decoder_layers
from .packed_seqs import to_device


class Replay:
    """Recorded and replayed choices of one router.

    Experts are set for the next call only, and for its recomputation in the backward pass. Backward passes have the
    order of the forward passes, so calls are recomputed first in, first out.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self._next_experts: Tensor | None = None
        self._recompute_queue: deque[Tensor | None] = deque()  # calls that will be recomputed
        self._records: list[Tensor] = []

    def set_experts(self, experts: Tensor) -> None:
        """Set the next call's experts [tokens, topk], of any integer type; where negative, the router chooses."""
        self._next_experts = experts

    def pop_experts(self, *, training: bool) -> Tensor | None:
        """Return the experts to replay in this call, or None."""
        if training and torch.is_grad_enabled() and self._recompute_queue:
            return self._recompute_queue.popleft()
        experts, self._next_experts = self._next_experts, None
        if training and not torch.is_grad_enabled():  # the first pass of a recomputed layer
            self._recompute_queue.append(experts)
        return experts

    def record(self, experts: Tensor) -> None:
        """Record the experts of a call, [tokens, topk]."""
        if self.is_recording:
            self._records.append(experts.int())  # NCCL has no shorter integer type for this

    def pop_records(self) -> list[Tensor]:
        """Return and clear the experts of each recorded call, int32 [tokens, topk]."""
        records, self._records = self._records, []
        return records


def replay_choice(chosen: Tensor, replayed: Tensor | None) -> Tensor:
    """Return the replayed experts, or the router's choice where they are negative or None. Both [tokens, topk]."""
    if replayed is None:
        return chosen
    replayed = replayed.to(chosen.dtype)
    return torch.where(replayed < 0, chosen, replayed)


class ReplayedRouter(Protocol):
    """Interface of a router that replays choices; see layers/router.py."""

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
        """Return the scores and indices of each token's experts, both [tokens, topk], from scores [tokens, experts]."""
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        replay: Replay = self._router.replay
        replayed = replay.pop_experts(training=self._router.training)
        if replayed is None and not replay.is_recording:
            return values, chosen
        if not torch.is_grad_enabled():  # without gradients megatron-core returns unsorted experts
            chosen = chosen.gather(1, values.argsort(dim=1, descending=True, stable=True))
        experts = replay_choice(chosen, replayed)
        replay.record(experts)
        return scores.gather(1, experts), experts


def find_routers(chunk: nn.Module) -> dict[int, ReplayedRouter]:
    """Return the routers of a chunk (bare or wrapped) by the global index of their layer, from 0."""
    layers = decoder_layers(cast(GPTModel, getattr(chunk, "module", chunk)))
    routers = {layer.layer_number - 1: getattr(layer.mlp, "router", None) for layer in layers}
    return {number: router for number, router in routers.items() if router is not None}


def replay_experts(chunk: nn.Module, experts: Tensor) -> None:
    """Set the experts of a chunk's next forward pass: [local length, layers, topk], with all layers of the model.

    With sequence parallelism each rank's routers get its part of the tokens.
    """
    routers = find_routers(chunk)
    if not routers:  # a pipeline stage of dense layers
        return
    first_router = next(iter(routers.values()))
    if first_router.config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        experts = experts.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    by_layer = to_device(experts[:, list(routers)].transpose(0, 1).contiguous(), first_router.weight.device)
    for router, layer_experts in zip(routers.values(), by_layer, strict=True):
        router.replay.set_experts(layer_experts)


@contextmanager
def record_experts(chunks: Sequence[nn.Module]) -> Iterator[Callable[[], dict[int, list[Tensor]]]]:
    """Record the routers' choices, and yield a function that returns and clears them.

    It returns, by global layer index, a list with the experts of each micro batch for each MoE layer of this pipeline
    stage: int16 [local length, topk], on the CPU.
    """
    routers = {number: router for chunk in chunks for number, router in find_routers(chunk).items()}
    for router in routers.values():
        router.replay.is_recording = True

    def pop_records() -> dict[int, list[Tensor]]:
        return {number: [_gather(r, x) for x in r.replay.pop_records()] for number, r in sorted(routers.items())}

    try:
        yield pop_records
    finally:
        for router in routers.values():
            router.replay.is_recording = False
            router.replay.pop_records()


def _gather(router: ReplayedRouter, experts: Tensor) -> Tensor:
    """Gather the experts over the sequence-parallel ranks."""
    if router.config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        parts = [torch.empty_like(experts) for _ in range(ranks)]
        group = cast(ProcessGroup, parallel_state.get_tensor_model_parallel_group())
        torch.distributed.all_gather(parts, experts.contiguous(), group=group)
        experts = torch.cat(parts)
    return experts.short().cpu()
