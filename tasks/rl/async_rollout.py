"""`--async_generate`: the next rollout batch is generated while the policy trains on the present one.

A thread of each rank does it, and the threads of all ranks have a process group of their own: nothing of it meets
training's collectives. Servers generate, and nobody changes their weights meanwhile.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...bridge import runtime
from ..distributed.collectives import gloo_group, new_gloo_group, run_on_all_ranks, use_group
from ..rollout.server_connection import WeightsLost
from .episode import Episode, from_tensors, to_tensors
from .rollout_metrics import RolloutMetrics
from .rollout_worker import RolloutWorker


@dataclass
class RolloutBatch:
    """Scored episodes of one generation, and where their worker was after them."""

    episodes: list[Episode]
    metrics: RolloutMetrics
    prompts_taken: int = 0
    completions_drawn: int = 0

    def numbers(self) -> dict[str, Any]:
        """Return its metrics for a checkpoint, as JSON; without times, which are this process's."""
        return {name: sums for name, sums in self.metrics.state().items() if not name.startswith("timing_s/")}

    def tensors(self) -> dict[str, Tensor]:
        """Return its episodes, for a checkpoint."""
        return {f"ahead/{name}": value for name, value in to_tensors(self.episodes).items()}

    @classmethod
    def load(cls, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> "RolloutBatch":
        """Return the batch that `tensors` and `numbers` describe."""
        prefix = "ahead/"
        of_batch = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        batch = cls(from_tensors(of_batch), RolloutMetrics())
        batch.metrics.load(numbers)
        return batch


class AsyncRollout:
    """Generates one rollout batch at a time in the background. Every rank has one; all call its methods alike."""

    def __init__(self):
        self._group = new_gloo_group()
        self._thread: threading.Thread | None = None
        self._batch: RolloutBatch | None = None
        self._error: Exception | None = None

    def start(self, worker: RolloutWorker) -> None:
        """Begin to generate by the weights that the servers have. worker: a detached one."""
        self._batch = None
        self._thread = threading.Thread(target=self._run, args=(worker,), name="async rollout", daemon=True)
        self._thread.start()

    def _run(self, worker: RolloutWorker) -> None:
        if torch.cuda.is_available():  # each thread chooses its device
            torch.cuda.set_device(runtime.device())
        try:
            with use_group(self._group):
                episodes = worker.collect(worker.metrics.timed)
                self._batch = RolloutBatch(episodes, worker.metrics, worker.prompts.consumed, worker.sampler.drawn)
        except WeightsLost:  # the server came back without the weights: the batch is generated again
            pass
        except Exception as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def raise_if_failed(self) -> None:
        """Raise, on every rank, the error of the background work so far; does not wait for it."""
        run_on_all_ranks(self._raise, gloo_group())

    def wait(self) -> RolloutBatch | None:
        """Wait for the batch, and return it once; None where a server was lost, which has no weights now."""
        if self._thread is not None:
            self._thread.join()
        self._raise()
        self._thread = None
        return self._batch

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
