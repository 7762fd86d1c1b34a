"""Ranks that hold the others up: seconds that each spends on a step by itself, and the slowest named in the log.

A rank's own time is that for its data, and from the start of a step until its gradients meet those of other
data-parallel ranks. Ranks of one pipeline or tensor-parallel group wait for each other within it and are slow together.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...bridge import runtime
from .step import AsyncScalars, TrainState, recorded_event

SLOW = 1.3  # times the median of the ranks with the same work
LEAST = 0.02  # seconds above the median: less is noise


class StepTimes:
    """Times of this rank's steps since the last line of the log, and what all ranks' say.

    times.begin(data_wait)      # before each train_step
    text = times.close()()      # on every rank, at a line of the log: which ranks are slow, or ""
    """

    def __init__(self, training: TrainState):
        """Every rank makes one. Where no two ranks have the same work nothing is measured."""
        config = training.model.config
        group: Any = training.model.groups.dp
        groups: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(groups, dist.get_process_group_ranks(group))
        self._groups = [list(ranks) for ranks in sorted({tuple(ranks) for ranks in groups}) if len(ranks) > 1]
        self._on_gpu = runtime.device().type == "cuda"
        self._marks: list[list[torch.cuda.Event | float]] = []  # start and end of each step
        self._data, self._slow_before = 0.0, False
        if self._groups:
            finalize = config.finalize_model_grads_func
            assert finalize is not None

            def marked(*args, **settings):
                self._marks[-1].append(self._now())
                return finalize(*args, **settings)

            config.finalize_model_grads_func = marked

    def begin(self, data_wait: float) -> None:
        """A step begins, which has waited so many seconds for its data."""
        if self._groups:
            self._data += data_wait
            self._marks.append([self._now()])

    def close(self) -> Callable[[], str]:
        """Return what waits for the times of all ranks, and gives the slow ones as text on two lines of the log in a
        row. Every rank calls this."""
        if not self._groups:
            return lambda: ""
        done = self._marks[:-1] if self._on_gpu else self._marks  # the device may be at the last one
        seconds = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
        if done:
            step_seconds = sum(_between(*marks) for marks in done if len(marks) == 2) / len(done)
            seconds[dist.get_rank()] = torch.tensor([step_seconds + self._data / len(done), self._data / len(done)])
        self._marks, self._data = self._marks[len(done) :], 0.0
        times: Tensor = seconds.to(runtime.device(), non_blocking=True)
        dist.all_reduce(times)
        numbers = AsyncScalars(times)

        def text() -> str:
            slow = slow_ranks(numbers.wait(), self._groups)  # pyright: ignore[reportArgumentType]
            repeated, self._slow_before = bool(slow) and self._slow_before, bool(slow)
            return slow if repeated else ""

        return text

    def _now(self) -> torch.cuda.Event | float:
        return recorded_event() if self._on_gpu else time.perf_counter()


def slow_ranks(times: Sequence[Sequence[float]], groups: Sequence[Sequence[int]]) -> str:
    """Return which ranks take much longer than the median of their group, the slowest first; "" where none does.

    times: seconds of each rank's step, and those of them for its data. groups: ranks that have the same work.
    """
    slow = []
    for ranks in groups:
        median = statistics.median_low([times[rank][0] for rank in ranks])
        slow += [
            (times[rank][0] / median, rank, median)
            for rank in ranks
            if median and times[rank][0] > max(SLOW * median, median + LEAST)
        ]
    return "; ".join(
        f"rank {rank} takes {times[rank][0]:.3g} s a step, {times[rank][1]:.3g} s of them for its data; the median of "
        f"the ranks with the same work is {median:.3g} s"
        for _, rank, median in sorted(slow, reverse=True)[:4]
    )


def _between(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1000
    return end - start  # pyright: ignore[reportOperatorIssue]
