"""The trainer: takes steps on batches, and calls back what logs, evaluates, saves and stops the run."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from ...bridge.checkpoint.writer import ShardWriter
from ...bridge.parallel import barrier
from ...templates.batching.collator import Batch
from ...templates.batching.dataloader import Batches
from ..distributed.signals import Stop
from ..distributed.watchdog import Watchdog
from ..observability.profiler import Profile
from ..run.context import Run, streamed
from .callbacks import Callback, CollectGarbage, ProfileSteps, ReportProgress, StepRecord, StopSignals
from .checkpointer import Checkpoints
from .evaluation import Evaluate
from .objective import Data, Objective
from .saving import Save
from .step import NonFiniteError, TrainState, run_again, train_step
from .step_logger import StepLogger
from .train_state import read_own


class Trainer:
    """Trains one run, on every rank alike.

    A task's loop, or `_train_on_data`, makes the batches of each step:

        for step in trainer.steps():         # until the last one, or a stop
            with trainer.phase("data"):      # a part of the step, for the watchdog and the profiler
                batches = ...
            trainer.step(batches)            # logs, evaluates and saves too
    """

    def __init__(
        self, run: Run, state: TrainState, objective: Objective, train: Data, val: Data | None, max_steps: int
    ):
        self.run, self.state, self.objective, self.max_steps = run, state, objective, max_steps
        self._train, self._val = train, val
        self.steps_done = run.resumed.step if run.resumed else 0
        self.stop_reason: str | None = None
        if objective.loop and run.resumed and not run.options.resume.ignore_data_skip:
            objective.loop.load(read_own(run.resumed.folder, 0, "rollout/"))
        self._logger = StepLogger(run, state, objective, max_steps)
        self.log = log = self._logger.log
        first = self.steps_done + 1
        note = log.note if run.writes else print
        profile = Profile(run.options.profile, run.folder, max_steps, note, log.meter.paused, first=first)
        self._stop = Stop(run.options.resume.exit_duration_in_mins)
        self.watchdog = Watchdog(run.options.build.ddp_timeout, run.folder, lambda: ShardWriter.total_runs_taken)
        following = objective.follower and objective.follower.reference
        self._checkpoints = Checkpoints(run, state, self.watchdog, log.note, following, log.written)
        evaluate = [Evaluate(run.options, state, objective, val, self.watchdog, log)] if val is not None else []
        self._callbacks: list[Callback] = [
            StopSignals(self._stop),
            ReportProgress(run, max_steps),
            self._logger,
            ProfileSteps(profile),
            *evaluate,
            Save(run, state, objective, train, self._logger, self._checkpoints),
            CollectGarbage(run.options),
        ]
        self._data_wait, self._epoch = 0.0, train.epoch

    def fit(self) -> str | None:
        """Train to the last step, or until a stop, whose reason is returned: the run is saved then."""
        if self.steps_done >= self.max_steps:
            self.log.note(f"The checkpoint is of step {self.steps_done}, the run's last: nothing is left to train.")
        gc.collect()
        gc.freeze()  # collections during training need not go through all that was imported and built
        try:
            if self.objective.loop:
                self.objective.loop.train(self)
            else:
                self._train_on_data()
            self._checkpoints.settle()
        except Exception as error:
            self._fail(error)
            raise
        self._finish()
        return self.stop_reason

    def _train_on_data(self) -> None:
        assert isinstance(self._train, Batches)
        batches = self._train.steps()
        if self._train.loss_tokens_are_local:
            batches = streamed(batches, self.state.model.groups)
        for _ in self.steps():
            with self.phase("data"):
                step_batches = next(batches)
            self.step(step_batches)

    def steps(self) -> Iterator[int]:
        """Yield the number of each step, from 1, until the last one or a stop. `step` is called once for each."""
        while self.steps_done < self.max_steps and self.stop_reason is None:
            step = self.steps_done + 1
            self._data_wait, self._epoch = 0.0, self._train.epoch
            for callback in self._callbacks:
                callback.pre_step(step)
            self.watchdog.phase(f"before step {step}")
            yield step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of the next step. Seconds of "data" are the log's `data_wait`."""
        began = time.perf_counter()
        with self.watchdog.phase(f"{name} of step {self.steps_done + 1}"), torch.profiler.record_function(name):
            yield
        if name == "data":
            self._data_wait += time.perf_counter() - began

    def step(self, batches: list[Batch]) -> None:
        """Take one optimizer step on this rank's micro batches, and do what is due after it."""
        step, objective = self.steps_done + 1, self.objective
        self.watchdog.phase(f"step {step}", learn=True)
        learning_rate = self.state.learning_rate
        batches = objective.prepare(self.state, batches, False)
        self._logger.begin_step(self._data_wait)
        is_passed_over = step in self.run.options.optimizer.iterations_to_skip
        metrics, result = train_step(
            self.state, batches, objective.loss, step, objective.output, passed_over=is_passed_over
        )
        if objective.follower:
            objective.follower(self.state, step)
        self.steps_done = step
        self.stop_reason = self._stop.reason() if step < self.max_steps else None
        saves = self._is_save_step(step)
        eval_steps = self.run.options.training.eval_steps
        evaluates = self._val is not None and (self._is_every(eval_steps) if eval_steps else saves)
        record = StepRecord(
            step,
            batches,
            metrics,
            result,
            learning_rate,
            self._data_wait,
            is_passed_over,
            evaluates,
            saves or self.stop_reason is not None,
        )
        for callback in self._callbacks:
            callback.post_step(record)

    def _is_every(self, steps: int) -> bool:
        return self.steps_done % steps == 0 or self.steps_done == self.max_steps

    def _is_save_step(self, step: int) -> bool:
        if self.run.options.checkpoint.save_strategy == "steps":
            return self._is_every(self.run.options.checkpoint.save_steps)
        return step == self.max_steps or self._train.epoch != self._epoch

    def _fail(self, error: Exception) -> None:
        """Do what can be done before the run fails: none of it may hide the error."""
        if isinstance(error, NonFiniteError):
            with suppress(Exception), self.watchdog.phase("the step that was not finite, once more"):
                again = run_again(self.state, self.objective.loss, self.objective.output)
                error.args = (f"{error}. {again}",)
        with suppress(Exception):
            if self.objective.loop:
                self.objective.loop.release()
        with suppress(OSError, RuntimeError):
            self._checkpoints.settle()  # what is being written needs no rank's main thread
        if isinstance(error, NonFiniteError):
            self.log.close({"stopped": str(error)} | self._last_checkpoints())

    def _finish(self) -> None:
        self.watchdog.phase("the end of training")
        if self.objective.loop:
            self.objective.loop.close()
        barrier()
        self.watchdog.close()
        if self.stop_reason is None:
            self._stop.close()
        else:
            self.log.note(
                f"Stopped after step {self.steps_done} of {self.max_steps}: {self.stop_reason}. "
                "Set --resume_from_checkpoint auto to resume."
            )
        stopped = {"stopped": self.stop_reason} if self.stop_reason else {}
        self.log.close(stopped | self._last_checkpoints())

    def _last_checkpoints(self) -> dict[str, str | None]:
        last = {f"last_{name}": str(path) for name, path in self._checkpoints.last.items()}
        return {"last_checkpoint": None} | last
