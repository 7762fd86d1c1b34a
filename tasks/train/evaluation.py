"""Evaluation: loss and metrics of the evaluation data."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

from ...templates.batching.collator import Batch
from ...templates.batching.dataloader import Batches
from ..distributed.watchdog import Watchdog
from ..observability.run_logger import RunLog
from ..options import SftOptions
from .callbacks import Callback, StepRecord
from .objective import Data, Objective
from .step import TrainState, evaluate_step, sum_over_ranks


class EvaluationCallback(Callback):
    """Callback of `--eval_steps` and `--eval_on_start`."""

    def __init__(
        self, options: SftOptions, state: TrainState, objective: Objective, data: Data, watchdog: Watchdog, log: RunLog
    ):
        self._options, self._state, self._objective, self._data = options, state, objective, data
        self._watchdog, self._log = watchdog, log

    def post_step(self, record: StepRecord) -> None:
        if record.evaluates:
            record.eval_metrics = self.evaluate(record.step)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate after `step` (0: before the first), log the metrics and return them."""
        max_batches, tick = self._options.training.eval_iters, self._watchdog.tick
        with (
            self._log.meter.paused(),
            self._watchdog.phase(f"evaluation at step {step}"),
            self._collect_garbage(),
        ):
            if self._objective.loop:
                metrics = self._objective.loop.evaluate(self._state, self._data, max_batches, tick)
            else:
                assert isinstance(self._data, Batches)
                steps = islice(self._data.one_pass(), max_batches if max_batches >= 0 else None)
                metrics = evaluate_on(self._state, steps, self._objective, tick)
        self._log.evaluation(step, metrics)
        return metrics

    @contextmanager
    def _collect_garbage(self) -> Iterator[None]:
        """Collect garbage before and after the context, with `--manual_gc_eval`."""
        collects_garbage = self._options.training.manual_gc and self._options.training.manual_gc_eval
        if collects_garbage:
            gc.collect()
        yield
        if collects_garbage:
            gc.collect()


def evaluate_on(
    state: TrainState, steps: Iterable[list[Batch]], objective: Objective, tick: Callable[[], None]
) -> dict[str, float]:
    """Return the means of metrics over global batches, as `eval_<name>`. Calls `tick` before each global batch."""
    totals, weights = {}, 0.0
    for batches in steps:
        tick()
        batches, weight = objective.prepare(state, batches, True), objective.weight(batches[0])
        for name, value in evaluate_step(state, batches, objective.loss, objective.output).items():
            totals[name] = totals.get(name, 0.0) + value.double() * weight
        weights += weight
    sums = sum_over_ranks(state.model.groups, totals, objective.names).wait()
    means = objective.means(dict(zip(objective.names, sums, strict=True)), weights)
    return {f"eval_{name}": value for name, value in means.items()}
