"""Detection of slow ranks by their own time of a step; the log names the slowest.

A rank's own time is its wait for data, plus the time from the start of a step to the reduction of gradients over
data-parallel ranks. Ranks of one pipeline- or tensor-parallel group wait for each other, and are slow together.
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

SLOW_RATIO = 1.3  # a slow rank's time over the median of the ranks with the same work
MIN_EXCESS = 0.02  # seconds above the median, below which a difference is noise


class StepTimes:
    """Timer of this rank's steps since the last log line, and comparison with the other ranks.

    times.begin(data_wait)      # before each train_step
    text = times.close()()      # on every rank, at a log line: the slow ranks, or ""
    """

    def __init__(self, training: TrainState):
        """Wrap the hook that reduces gradients. Every rank calls this. Needs data-parallel ranks to compare."""
        config = training.model.config
        group: Any = training.model.groups.dp
        groups: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(groups, dist.get_process_group_ranks(group))
        self._groups = [list(ranks) for ranks in sorted({tuple(ranks) for ranks in groups}) if len(ranks) > 1]
        self._on_gpu = runtime.device().type == "cuda"
        self._marks: list[list[torch.cuda.Event | float]] = []  # start and end of each step
        self._data_seconds, self._was_slow = 0.0, False
        if self._groups:
            finalize = config.finalize_model_grads_func
            assert finalize is not None

            def finalize_and_mark(*args, **settings):
                self._marks[-1].append(self._now())
                return finalize(*args, **settings)

            config.finalize_model_grads_func = finalize_and_mark

    def begin(self, data_wait: float) -> None:
        """Record the start of a step. data_wait: seconds that it waited for its data."""
        if self._groups:
            self._data_seconds += data_wait
            self._marks.append([self._now()])

    def close(self) -> Callable[[], str]:
        """Start the exchange of times, and return a function that waits for it and returns the slow ranks as text.

        Every rank calls this. Slow ranks are reported from the second log line in a row on.
        """
        if not self._groups:
            return lambda: ""
        # The device may not have finished the last step.
        finished_marks = self._marks[:-1] if self._on_gpu else self._marks
        seconds = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
        if finished_marks:
            step_seconds = sum(_elapsed(*marks) for marks in finished_marks if len(marks) == 2) / len(finished_marks)
            seconds[dist.get_rank()] = torch.tensor(
                [step_seconds + self._data_seconds / len(finished_marks), self._data_seconds / len(finished_marks)]
            )
        self._marks, self._data_seconds = self._marks[len(finished_marks) :], 0.0
        times: Tensor = seconds.to(runtime.device(), non_blocking=True)
        dist.all_reduce(times)
        numbers = AsyncScalars(times)

        def text() -> str:
            slow = slow_ranks(numbers.wait(), self._groups)  # pyright: ignore[reportArgumentType]
            is_repeated, self._was_slow = bool(slow) and self._was_slow, bool(slow)
            return slow if is_repeated else ""

        return text

    def _now(self) -> torch.cuda.Event | float:
        return recorded_event() if self._on_gpu else time.perf_counter()


def slow_ranks(times: Sequence[Sequence[float]], groups: Sequence[Sequence[int]]) -> str:
    """Return the ranks that take much longer than the median of their group, slowest first, as text; "" if none.

    times: seconds of each rank's step including its wait for data, and of this wait. groups: ranks with the same work.
    """
    slow = []
    for ranks in groups:
        median = statistics.median_low([times[rank][0] for rank in ranks])
        slow += [
            (times[rank][0] / median, rank, median)
            for rank in ranks
            if median and times[rank][0] > max(SLOW_RATIO * median, median + MIN_EXCESS)
        ]
    return "; ".join(
        f"rank {rank} takes {times[rank][0]:.3g} s a step, {times[rank][1]:.3g} s of them for its data; the median of "
        f"the ranks with the same work is {median:.3g} s"
        for _, rank, median in sorted(slow, reverse=True)[:4]
    )


def _elapsed(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1000
    return end - start  # pyright: ignore[reportOperatorIssue]
