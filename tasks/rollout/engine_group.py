"""The engines of a run as one: every rank asks, and every rank is given all that was generated."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..distributed.collectives import on_every_rank, patient_group
from .engine import Completion, Request, Sampling, Writer


class Rollout[W: Writer]:
    """`engine`: this rank's, if it has one. Ranks `group` apart share an engine, all of which are asked alike; without
    `group`, the first rank alone has one (a server)."""

    def __init__(self, engine: W | None, group: int | None):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.engine, self._group = engine, group
        self._number, self._engines = (rank // group, world // group) if group else (0, 1)
        self._answers = rank % group == 0 if group else rank == 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """A completion of each request, in their order. Every rank asks for the same."""
        group = patient_group()
        own = list(requests[self._number :: self._engines])
        asked = self.engine is not None
        found = on_every_rank(lambda: self.engine.generate(own, sampling) if asked else [], group)  # type: ignore[union-attr]
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (self._number, found) if self._answers else None, group)
        completions: list[Completion] = [None] * len(requests)  # type: ignore[list-item]
        for number, of_engine in filter(None, answers):
            completions[number :: self._engines] = of_engine
        return completions

    def without_weights(self) -> "Rollout":
        """The same engines; who has weights for them is left out."""
        return Rollout(self.engine, self._group)

    def sleep(self) -> None:
        if self.engine is not None:
            self.engine.sleep()

    def wake(self) -> None:
        if self.engine is not None:
            self.engine.wake()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
