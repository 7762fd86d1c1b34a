"""Asynchronous rollouts (`--async_generate`): the next batch is generated while the policy trains on the current one.

Each rank has a thread for this. The threads share a process group of their own, apart from training's collectives.
Servers generate, and their weights do not change meanwhile.
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
    """Scored episodes of one generation, and the worker's position after it."""

    episodes: list[Episode]
    metrics: RolloutMetrics
    prompts_consumed: int = 0
    completions_sampled: int = 0

    def metrics_state(self) -> dict[str, Any]:
        """Return the metrics for a checkpoint, as JSON. Times are left out, since they belong to this process."""
        return {name: sums for name, sums in self.metrics.state().items() if not name.startswith("timing_s/")}

    def tensors(self) -> dict[str, Tensor]:
        """Return the episodes for a checkpoint."""
        return {f"ahead/{name}": value for name, value in to_tensors(self.episodes).items()}

    @classmethod
    def load(cls, tensors: dict[str, Tensor], metrics_state: dict[str, Any]) -> "RolloutBatch":
        """Return the batch from the results of `tensors` and `metrics_state`."""
        prefix = "ahead/"
        batch_tensors = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        batch = cls(from_tensors(batch_tensors), RolloutMetrics())
        batch.metrics.load(metrics_state)
        return batch


class AsyncRollout:
    """Background generation of one rollout batch at a time. Every rank has an instance and makes the same calls."""

    def __init__(self):
        self._group = new_gloo_group()
        self._thread: threading.Thread | None = None
        self._batch: RolloutBatch | None = None
        self._error: Exception | None = None

    def start(self, worker: RolloutWorker) -> None:
        """Start to generate with the servers' current weights. worker: of `RolloutWorker.detached`."""
        self._batch = None
        self._thread = threading.Thread(target=self._run, args=(worker,), name="async rollout", daemon=True)
        self._thread.start()

    def _run(self, worker: RolloutWorker) -> None:
        if torch.cuda.is_available():  # the current device is per thread
            torch.cuda.set_device(runtime.device())
        try:
            with use_group(self._group):
                episodes = worker.collect(worker.metrics.timed)
                self._batch = RolloutBatch(
                    episodes, worker.metrics, worker.prompts.consumed, worker.sampler.num_sampled
                )
        except WeightsLost:  # a server restarted without the weights: the batch is generated again
            pass
        except Exception as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def raise_if_failed(self) -> None:
        """Raise the background thread's error, if any, on every rank. Does not wait for the thread."""
        run_on_all_ranks(self._raise, gloo_group())

    def wait(self) -> RolloutBatch | None:
        """Wait for the batch and return it once. None if a server restarted and lost its weights."""
        if self._thread is not None:
            self._thread.join()
        self._raise()
        self._thread = None
        return self._batch

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
