"""Callbacks of the trainer: the interface, and the short ones."""

import gc
from dataclasses import dataclass, field

from torch import Tensor

from ...templates.batching.collator import Batch
from ..distributed.signals import Stop
from ..observability.profiler import Profile
from ..options import SftOptions
from ..run.context import Run
from ..run.interrupt import Progress, report
from .step import StepResult


@dataclass
class StepRecord:
    """A step that was given to the device, which may still compute it, and what follows it."""

    step: int  # counted from 1
    batches: list[Batch]  # this rank's
    metrics: dict[str, Tensor]  # this rank's sums; empty but on the last pipeline stage
    result: StepResult
    learning_rate: float
    data_wait: float  # seconds that this rank waited for data
    is_passed_over: bool  # --iterations_to_skip
    evaluates: bool
    saves: bool
    eval_metrics: dict[str, float] = field(default_factory=dict)  # filled by the evaluation


class Callback:
    """Hooks of the trainer, which do nothing. Every rank calls them, in the same order."""

    def pre_step(self, step: int) -> None:
        """Before the data of a step, counted from 1."""

    def post_step(self, record: StepRecord) -> None:
        """After a step was given to the device."""


class StopSignals(Callback):
    """Begins to ask all ranks for signals; the answer has come when the step ends."""

    def __init__(self, stop: Stop):
        self._stop = stop

    def pre_step(self, step: int) -> None:
        self._stop.exchange()


class ReportProgress(Callback):
    """Notes how far the run is, for the message of an interrupt."""

    def __init__(self, run: Run, max_steps: int):
        self._run, self._max_steps = run, max_steps

    def pre_step(self, step: int) -> None:
        resumed = self._run.resumed.checkpoint if self._run.resumed else None
        report(Progress(self._run.folder, step, self._max_steps, resumed))


class ProfileSteps(Callback):
    """`--profile true`."""

    def __init__(self, profile: Profile):
        self._profile = profile

    def pre_step(self, step: int) -> None:
        self._profile.before(step)

    def post_step(self, record: StepRecord) -> None:
        self._profile.after(record.step)


class CollectGarbage(Callback):
    """`--manual_gc_steps`."""

    def __init__(self, options: SftOptions):
        self._every = options.training.manual_gc_steps if options.training.manual_gc else 0

    def post_step(self, record: StepRecord) -> None:
        if self._every and record.step % self._every == 0:
            gc.collect()
