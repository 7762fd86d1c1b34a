"""All engines of a run as one: every rank sends the same requests and gets all completions."""

from collections.abc import Sequence

import torch.distributed as dist

from ..distributed.collectives import all_gather_objects, gloo_group, run_on_all_ranks
from .engine import Completion, CompletionEngine, Request, Sampling


class EngineGroup[W: CompletionEngine]:
    """Engines of all ranks.

    `engine`: this rank's engine, if any. Each `group` consecutive ranks share an engine and get the same requests.
    Without `group`, only rank 0 has one (a server).
    """

    def __init__(self, engine: W | None, group: int | None):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.engine, self._group = engine, group
        self._number, self._engines = (rank // group, world // group) if group else (0, 1)
        self._is_first = rank % group == 0 if group else rank == 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return a completion of each request, in their order. Every rank passes the same requests."""
        group, engine = gloo_group(), self.engine
        local_requests = list(requests[self._number :: self._engines])
        local = run_on_all_ranks(lambda: engine.generate(local_requests, sampling) if engine else [], group)
        completions: list[Completion] = [None] * len(requests)  # type: ignore[list-item]
        for number, part in filter(None, all_gather_objects((self._number, local) if self._is_first else None, group)):
            completions[number :: self._engines] = part
        return completions

    def detach(self) -> "EngineGroup":
        """Return the same engines without the model whose weights they get."""
        return EngineGroup(self.engine, self._group)

    def sleep(self) -> None:
        if self.engine is not None:
            self.engine.sleep()

    def wake(self) -> None:
        if self.engine is not None:
            self.engine.wake()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
