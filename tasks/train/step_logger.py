"""The log of steps. A step's numbers are read while the device computes the next one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...bridge.model.tower_pass import TowerPass
from ...bridge.option_groups import flag_values
from ..observability.flops import Flops, peak_flops
from ..observability.run_logger import RunLog, Start, Waiting
from ..run.args_json import SECRET
from ..run.context import Run
from .callbacks import Callback, StepRecord
from .metrics import MetricsAccumulator, Reduced, auxiliary_losses
from .objective import Objective
from .step import AsyncScalars, StepTimer, TrainState, sum_over_ranks
from .step_times import StepTimes
from .train_state import read_rank_tensors


@dataclass
class _Deferred:
    """A step whose numbers have not been read yet."""

    record: StepRecord
    excluded: float  # seconds that were not training's, when the step was given to the device
    reduced: Reduced | None  # means since the last line, where one is due
    loop_metrics: dict[str, float]
    slow_ranks: Callable[[], str] | None
    before_first: AsyncScalars | None  # tokens and FLOPs before the first line, which are in no rate
    vision: list[TowerPass]  # the vision tower's passes


class _VisionShare:
    """Share of the vision tower in this rank's time since the last line."""

    def __init__(self) -> None:
        self._last_end: float | None = None
        self._tower, self._total = 0.0, 0.0

    def add(self, tower: float, end: float) -> None:
        """Add a step that ended at `end` seconds, of which the tower took `tower`. The first step has no begin."""
        if self._last_end is not None:
            self._tower += tower
            self._total += end - self._last_end
        self._last_end = end

    def pop(self) -> float:
        share = self._tower / self._total if self._total else 0.0
        self._tower, self._total = 0.0, 0.0
        return share


class StepLogger(Callback):
    """Writes a line of the log every --logging_steps, one step late but for the first step."""

    def __init__(self, run: Run, state: TrainState, objective: Objective, max_steps: int):
        self._state, self._objective = state, objective
        self._flops = Flops.of_model(state.model, scores_tokens=objective.scores_tokens)
        self.metrics, self._times, self._timer = (
            MetricsAccumulator(objective, state.model.groups),
            StepTimes(state),
            StepTimer(),
        )
        start = self._start(run)
        self._first = start.step + 1
        self.log = RunLog(
            run.folder if run.writes else None,
            run.options.logging,
            max_steps,
            peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None,
            dist.get_world_size(),
            start=start,
            six_n=self._flops.six_n_d(1) if state.model.trained_share == 1 else None,
            settings={name: value for name, value in flag_values(run.options).items() if name not in SECRET},
        )
        self._deferred: _Deferred | None = None
        self._vision = _VisionShare()
        self.on_line: Callable[[int, dict[str, float]], None] = lambda step, values: None  # called after each line

    def _start(self, run: Run) -> Start:
        """Return where the log of the run that is resumed ended."""
        if run.resumed is None:
            return Start()
        state = run.resumed.state
        tokens = state["tokens"]
        if state["layout"] == run.layout:
            self.metrics.load(read_rank_tensors(run.resumed.folder, dist.get_rank(), "window/"))
        else:  # the sums of each rank are of other ranks than there are now
            tokens += state["window_tokens"]
        waiting = Waiting(
            *sum_over_ranks(self._state.model.groups, {}, [], self.metrics.tokens, self.metrics.flops).wait()
        )
        return Start(run.resumed.step, tokens, state["elapsed"], waiting, state.get("spikes", 0))

    def begin_step(self, data_wait: float) -> None:
        """Note when a step is given to the device, on this rank."""
        self._times.begin(data_wait)

    def post_step(self, record: StepRecord) -> None:
        self.flush()  # the step before, whose numbers have come; the device has this one to do
        if record.skips_update:
            self.log.note(f"step {record.step}: no update (--iterations_to_skip)")
        if record.result.is_overflow:
            self.log.note(f"step {record.step}: no update, fp16's gradients overflow; their scale is lowered")
        self.metrics.add(record.batches, record.metrics, self._flops, auxiliary_losses(self._state))
        is_due, loop, sums = self.log.due(record.step), self._objective.loop, self.metrics
        first = not is_due and record.step == self._first
        self._deferred = _Deferred(
            record,
            self.log.meter.excluded,
            self.metrics.reduce(self._state) if is_due else None,
            loop.pop_metrics() if loop and is_due else {},
            self._times.close() if is_due else None,
            sum_over_ranks(sums.groups, {}, [], sums.tokens, sums.flops) if first else None,
            self._state.model.vision.pop_spans() if self._state.model.vision else [],
        )
        # The first line would come up to a step late, since the host waits for the device within the second step.
        if record.step == self._first or record.evaluates or record.saves or not torch.cuda.is_available():
            self._state.synchronize()
            self.flush()

    def flush(self) -> None:
        """Record the last step, which has ended, and write its line where one is due."""
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return
        record, log = deferred.record, self.log
        ended = self._timer.end_of(record.result) - deferred.excluded
        if record.result.is_spike:
            log.spike(record.step)
        self._vision.add(sum(span.seconds() for span in deferred.vision), ended)
        if deferred.reduced is None:
            before = Waiting(*deferred.before_first.wait()) if deferred.before_first else None
            log.step(0, 0.0, record.data_wait, ended, before)
            return
        means, tokens, cost = deferred.reduced()
        log.step(int(tokens), cost, record.data_wait, ended)
        grad_norm = record.result.grad_norm
        norm = {} if grad_norm is None else {"grad_norm": grad_norm}
        if self._state.model.vision:
            means["vision_share"] = self._vision.pop()
        values = means | deferred.loop_metrics | norm | {"learning_rate": record.learning_rate}
        log.train(record.step, values)
        self.on_line(record.step, values)
        if deferred.slow_ranks and (ranks := deferred.slow_ranks()):
            log.note(f"step {record.step}: slow: {ranks}")
