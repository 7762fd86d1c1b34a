"""Throughput of training: tokens, FLOPs and seconds of steps, over a window and over the run."""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple


class Waiting(NamedTuple):
    """Tokens and FLOPs over all ranks of the steps since the last log line."""

    tokens: float
    flops: float


class Meter:
    """Throughput over a window of steps, and over the whole run without the first, warm-up step.

    Times are the ends of steps as measured by the GPU, since the host runs ahead.
    """

    def __init__(self, world_size: int, chip_peak_flops: float | None, tokens: int = 0, waiting: Waiting | None = None):
        """Start the meter. tokens: of the resumed run up to its last log line. waiting: those after it."""
        self.world_size = world_size
        self.chip_peak_flops = chip_peak_flops
        self.steps = 0  # since the start
        self.tokens = tokens  # over all ranks and the whole run
        self.excluded = 0.0  # seconds outside of steps
        self._ended = time.perf_counter()
        self._flops = 0.0
        self._data_wait = 0.0
        self._origin = self._window = self._run = self._mark(waiting)

    def step(
        self, tokens: int, flops: float, data_wait: float, ended: float | None = None, waiting: Waiting | None = None
    ) -> None:
        """Record a step: tokens and FLOPs over all ranks, and the seconds that this rank waited for its data.

        ended: end of the step by time.perf_counter(), minus the time excluded until then; None: now.
        waiting: tokens and FLOPs of the steps so far.
        """
        self._ended = time.perf_counter() - self.excluded if ended is None else ended
        self.steps += 1
        self.tokens += tokens
        self._flops += flops
        self._data_wait += data_wait
        if self.steps == 1:
            self._window = self._run = self._mark(waiting)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time within the context: an evaluation, a checkpoint."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.excluded += time.perf_counter() - start

    def window(self) -> dict[str, float | None]:
        """Return the rates since the last call. The first step is excluded as soon as there are others."""
        rates = self._rates(self._window)
        self._window = self._mark()
        return rates

    def total(self) -> dict[str, float | None]:
        """Return the rates since the first step."""
        return self._rates(self._run)

    def _mark(self, waiting: Waiting | None = None) -> tuple[float, int, float, float, float]:
        tokens, flops = waiting or (0.0, 0.0)
        return self._ended, self.steps, self.tokens + tokens, self._flops + flops, self._data_wait

    def _rates(self, since: tuple[float, int, float, float, float]) -> dict[str, float | None]:
        if since[1] == self.steps:
            since = self._origin
        seconds, steps, tokens, flops, data_wait = (now - then for now, then in zip(self._mark(), since, strict=True))
        seconds = max(seconds, 1e-9)
        flops_per_second = flops / seconds / self.world_size
        return {
            "tokens_per_second_per_gpu": tokens / seconds / self.world_size,
            "tflops_per_gpu": flops_per_second / 1e12,
            "mfu": flops_per_second / self.chip_peak_flops if self.chip_peak_flops else None,
            "data_wait": data_wait / max(steps, 1),
            "seconds_per_step": seconds / max(steps, 1),
        }
