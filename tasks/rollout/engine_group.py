"""Engines of all ranks of a run: every rank passes the same requests and gets all completions."""

from collections.abc import Sequence

import torch.distributed as dist

from ..distributed.collectives import all_gather_objects, gloo_group, run_on_all_ranks
from .engine import Completion, CompletionEngine, Request, Sampling


class EngineGroup[W: CompletionEngine]:
    """Engines of all ranks, used together.

    `engine`: this rank's engine, if any.
    `ranks_per_engine`: number of consecutive ranks that share an engine and pass it the same requests. None: only
        rank 0 has an engine (a server).
    """

    def __init__(self, engine: W | None, ranks_per_engine: int | None):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.engine, self._ranks_per_engine = engine, ranks_per_engine
        self._engine_index, self._engine_count = (
            (rank // ranks_per_engine, world // ranks_per_engine) if ranks_per_engine else (0, 1)
        )
        self._is_first_rank = rank % ranks_per_engine == 0 if ranks_per_engine else rank == 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return a completion of each request, in their order. Every rank passes the same requests."""
        group, engine = gloo_group(), self.engine
        local_requests = list(requests[self._engine_index :: self._engine_count])
        local = run_on_all_ranks(lambda: engine.generate(local_requests, sampling) if engine else [], group)
        completions: list[Completion] = [None] * len(requests)  # type: ignore[list-item]
        for index, engine_completions in filter(
            None, all_gather_objects((self._engine_index, local) if self._is_first_rank else None, group)
        ):
            completions[index :: self._engine_count] = engine_completions
        return completions

    def detach(self) -> "EngineGroup":
        """Return the same engines as a plain group, without the trained model."""
        return EngineGroup(self.engine, self._ranks_per_engine)

    def sleep(self) -> None:
        if self.engine is not None:
            self.engine.sleep()

    def wake(self) -> None:
        if self.engine is not None:
            self.engine.wake()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
