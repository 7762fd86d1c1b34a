"""A router's choices of experts, written down in one pass and repeated in another.

Which experts a token goes to hangs on small differences: of engine and trainer, of two passes of the trainer. Repeated,
the choice is the one that was made; the weights are computed anew, so that gradients reach the router
(https://arxiv.org/abs/2510.11370).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from .packed_seqs import to_device


class Replay:
    """Of one router, which asks for each call what `chosen` makes of its own choice.

    What is given holds for the next call alone, and for its recomputation in the backward pass. Backward passes come in
    the order of the forward passes: the first call that waits to be recomputed is the next one that is.
    """

    def __init__(self) -> None:
        self.records = False
        self._given: Tensor | None = None
        self._waiting: deque[Tensor | None] = deque()  # calls that will be recomputed
        self._recorded: list[Tensor] = []

    def give(self, experts: Tensor) -> None:
        """For the next call: experts [tokens, topk] of any integer type; below 0 where the router is to choose."""
        self._given = experts

    def take(self, *, training: bool) -> Tensor | None:
        """What was given for this call."""
        if training and torch.is_grad_enabled() and self._waiting:
            return self._waiting.popleft()
        given, self._given = self._given, None
        if training and not torch.is_grad_enabled():  # the first pass of what is recomputed
            self._waiting.append(given)
        return given

    def record(self, experts: Tensor) -> None:
        """Called with the experts of each call, [tokens, topk]."""
        if self.records:
            self._recorded.append(experts.int())  # what NCCL can send

    def recorded(self) -> list[Tensor]:
        """Of each call since this was last asked, int32 [tokens, topk]."""
        found, self._recorded = self._recorded, []
        return found


def chosen(own: Tensor, given: Tensor | None) -> Tensor:
    """The experts to take: those given, or where none are the router's own choice. Both [tokens, topk]."""
    if given is None:
        return own
    given = given.to(own.dtype)
    return torch.where(given < 0, own, given)


class CoreReplay:
    """`Replay` as megatron-core's function of the choice asks for it (RouterReplay.get_replay_topk)."""

    def __init__(self, router: Any):
        self._router = router

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """scores [tokens, experts] -> those of each token's experts, and the experts, both [tokens, topk]"""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        replay: Replay = self._router.replay
        given = replay.take(training=self._router.training)
        if given is None and not replay.records:
            return values, own
        if not torch.is_grad_enabled():  # where megatron-core leaves them in any order
            own = own.gather(1, values.argsort(dim=1, descending=True, stable=True))
        experts = chosen(own, given)
        replay.record(experts)
        return scores.gather(1, experts), experts


def routers(chunk: GPTModel) -> dict[int, Any]:
    """The routers of a chunk (bare or wrapped) by the number of their layer in the model, from 0."""
    chunk = getattr(chunk, "module", chunk)
    found = {layer.layer_number - 1: getattr(layer.mlp, "router", None) for layer in chunk.decoder.layers}
    return {number: router for number, router in found.items() if router is not None}


def give(chunk: GPTModel, experts: Tensor) -> None:
    """For the next forward pass through the chunk: experts [local length, layers, topk] of all the model's layers.

    Under sequence parallelism a router has a part of the tokens.
    """
    here = routers(chunk)
    if not here:  # a pipeline stage of dense layers
        return
    one = next(iter(here.values()))
    if one.config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        experts = experts.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    by_layer = to_device(experts[:, list(here)].transpose(0, 1).contiguous(), one.weight.device)
    for router, of_layer in zip(here.values(), by_layer, strict=True):
        router.replay.give(of_layer)


@contextmanager
def recording(chunks: Sequence[GPTModel]) -> Iterator[Callable[[], dict[int, list[Tensor]]]]:
    """Within, routers write down what they choose. Gives what tells of it: for each layer of this pipeline stage, by
    its number in the model, the experts of one micro batch after the other, int16 [local length, topk] on the CPU."""
    own = {number: router for chunk in chunks for number, router in routers(chunk).items()}
    for router in own.values():
        router.replay.records = True

    def found() -> dict[int, list[Tensor]]:
        return {number: [_whole(r, each) for each in r.replay.recorded()] for number, r in sorted(own.items())}

    try:
        yield found
    finally:
        for router in own.values():
            router.replay.records = False
            router.replay.recorded()


def _whole(router: Any, experts: Tensor) -> Tensor:
    """Of all tokens of the tensor-parallel ranks, where sequence parallelism has split them."""
    if router.config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        parts = [torch.empty_like(experts) for _ in range(ranks)]
        torch.distributed.all_gather(
            parts, experts.contiguous(), group=parallel_state.get_tensor_model_parallel_group()
        )
        experts = torch.cat(parts)
    return experts.short().cpu()
