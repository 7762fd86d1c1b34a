"""Callback interface of the trainer, and its short callbacks."""

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
    """Launched step (the device may still compute it), and whether an evaluation or checkpoint follows."""

    step: int  # counted from 1
    batches: list[Batch]  # this rank's
    metrics: dict[str, Tensor]  # this rank's sums; only on the last pipeline stage, elsewhere empty
    result: StepResult
    learning_rate: float
    data_wait: float  # seconds that this rank waited for data
    skips_update: bool  # --iterations_to_skip
    evaluates: bool
    saves: bool
    eval_metrics: dict[str, float] = field(default_factory=dict)  # filled by the evaluation


class Callback:
    """Base class of callbacks, whose hooks do nothing. Every rank calls them in the same order."""

    def pre_step(self, step: int) -> None:
        """Run before a step, counted from 1, reads its data."""

    def post_step(self, record: StepRecord) -> None:
        """Run after a step is launched on the device."""


class StopSignalCallback(Callback):
    """Callback that starts the exchange of stop signals among all ranks; it completes during the step."""

    def __init__(self, stop: Stop):
        self._stop = stop

    def pre_step(self, step: int) -> None:
        self._stop.exchange()


class ProgressCallback(Callback):
    """Callback that records the run's progress for the message of an interrupt."""

    def __init__(self, run: Run, max_steps: int):
        self._run, self._max_steps = run, max_steps

    def pre_step(self, step: int) -> None:
        resumed = self._run.resumed.checkpoint if self._run.resumed else None
        report(Progress(self._run.folder, step, self._max_steps, resumed))


class ProfilerCallback(Callback):
    """Callback of `--profile true`."""

    def __init__(self, profile: Profile):
        self._profile = profile

    def pre_step(self, step: int) -> None:
        self._profile.before(step)

    def post_step(self, record: StepRecord) -> None:
        self._profile.after(record.step)


class GarbageCollectionCallback(Callback):
    """Callback of `--manual_gc_steps`."""

    def __init__(self, options: SftOptions):
        self._interval = options.training.manual_gc_steps if options.training.manual_gc else 0

    def post_step(self, record: StepRecord) -> None:
        if self._interval and record.step % self._interval == 0:
            gc.collect()
