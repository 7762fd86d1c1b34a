"""Trainer: runs the steps, and the callbacks that log, evaluate, save and stop the run."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ...bridge.checkpoint.writer import ShardWriter
from ...bridge.parallel import barrier
from ...templates.batching.collator import Batch
from ...templates.batching.dataloader import Batches
from ...templates.json_types import JsonObject
from ..distributed.signals import Stop
from ..distributed.watchdog import Watchdog
from ..observability.profiler import Profile
from ..report.command import write_report
from ..run.context import Run, streamed
from ..run.trial import is_trial
from .callbacks import (
    Callback,
    GarbageCollectionCallback,
    ProfilerCallback,
    ProgressCallback,
    StepRecord,
    StopSignalCallback,
)
from .checkpointer import Checkpointer
from .eval_command import EvalCommandCallback
from .evaluation import EvaluationCallback
from .objective import Data, Objective
from .plugin_callbacks import PluginCallbacks
from .saving import SaveCallback
from .step import NonFiniteError, TrainState, rerun_step, step_without_update, train_step
from .step_logger import StepLogger
from .train_state import read_rank_tensors


class Trainer:
    """Trainer of one run. Every rank calls every method in the same order.

    A task's loop, or `_train_on_data`, provides the batches of each step:

        for step in trainer.steps():         # until the last step or a stop
            with trainer.phase("data"):      # names a part of the step for the watchdog and the profiler
                batches = ...
            trainer.step(batches)            # also logs, evaluates and saves
    """

    def __init__(
        self, run: Run, state: TrainState, objective: Objective, train: Data, val: Data | None, max_steps: int
    ):
        self.run, self.state, self.objective, self.max_steps = run, state, objective, max_steps
        self._train, self._val = train, val
        self.steps_done = run.resumed.step if run.resumed else 0
        self.stop_reason: str | None = None
        if objective.loop and run.resumed and not run.options.resume.ignore_data_skip:
            objective.loop.load(read_rank_tensors(run.resumed.folder, 0, "rollout/"))
        self._logger = StepLogger(run, state, objective, max_steps)
        self.log = log = self._logger.log
        first_step = self.steps_done + 1
        note = log.note if run.writes else print
        profile = Profile(run.options.profile, run.folder, max_steps, note, log.meter.paused, first=first_step)
        self._stop = Stop(run.options.resume.exit_duration_in_mins)
        self.watchdog = Watchdog(
            run.options.build.ddp_timeout, run.folder, lambda: ShardWriter.total_runs_taken, log.show_phase
        )
        reference = objective.reference_sync and objective.reference_sync.reference
        self._eval_command = EvalCommandCallback(run, self.watchdog, log)
        self._checkpointer = Checkpointer(
            run, state, self.watchdog, log.note, reference, objective.role, log.written, self._eval_command
        )
        self._evaluation = (
            EvaluationCallback(run.options, state, objective, val, self.watchdog, log) if val is not None else None
        )
        self._plugins = PluginCallbacks(run, state, self._checkpointer, first_step, max_steps)
        self._logger.on_line = self._plugins.logged
        self._callbacks: list[Callback] = [
            StopSignalCallback(self._stop),
            ProgressCallback(run, max_steps),
            self._logger,
            ProfilerCallback(profile),
            *([self._evaluation] if self._evaluation else []),
            SaveCallback(run, state, objective, train, self._logger, self._checkpointer),
            self._eval_command,
            GarbageCollectionCallback(run.options),
            self._plugins,
        ]
        self._data_wait, self._epoch, self._is_trial = 0.0, train.epoch, is_trial()
        self._is_ended_by_plugin = False  # which is the end of the run, not an interruption

    def fit(self) -> str | None:
        """Train to the last step or to a stop, where the run is saved. Return the reason of a stop, else None."""
        if self.steps_done >= self.max_steps:
            self.log.note(f"The checkpoint is of step {self.steps_done}, the run's last: nothing is left to train.")
        gc.collect()
        gc.freeze()  # keeps garbage collections during training from scanning imported modules and the model
        try:
            self._plugins.train_begin()
            if self.run.options.training.eval_on_start and self.steps_done == 0 and self._evaluation:
                self._plugins.eval_begin()
                self._plugins.evaluated(0, self._evaluation.evaluate(0))
            if self.objective.loop:
                self.objective.loop.train(self)
            else:
                self._train_on_data()
            self._checkpointer.wait()
            self._plugins.train_end()
        except Exception as error:
            self._fail(error)
            raise
        self._finish()
        return None if self._is_ended_by_plugin else self.stop_reason

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
        """Yield the number of each step, from 1, until the last step or a stop. The caller calls `step` for each."""
        while self.steps_done < self.max_steps and self.stop_reason is None:
            step = self.steps_done + 1
            self._data_wait, self._epoch = 0.0, self._train.epoch
            self._plugins.begin_epoch(self._epoch)
            for callback in self._callbacks:
                callback.pre_step(step)
            self.watchdog.phase(f"before step {step}")
            yield step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of the next step. The seconds of "data" are logged as `data_wait`."""
        began = time.perf_counter()
        with self.watchdog.phase(f"{name} of step {self.steps_done + 1}"), torch.profiler.record_function(name):
            yield
        if name == "data":
            self._data_wait += time.perf_counter() - began

    def step(self, batches: list[Batch], *, updates: bool = True) -> None:
        """Take one optimizer step on this rank's micro batches, and run the callbacks.

        updates: if false, the step only evaluates the loss. Weights, optimizer and schedule stay as they are.
        """
        step, objective = self.steps_done + 1, self.objective
        self.watchdog.phase(f"step {step}", learn=True)
        learning_rate = self.state.learning_rate
        batches = objective.prepare(self.state, batches, False)
        self._logger.begin_step(self._data_wait)
        skips_update = step in self.run.options.optimizer.iterations_to_skip
        if updates:
            metrics, result = train_step(
                self.state, batches, objective.loss, step, objective.output, skips_update=skips_update
            )
        else:
            metrics, result = step_without_update(self.state, batches, objective.loss, step, objective.output)
        if objective.reference_sync:
            objective.reference_sync(self.state, step)
        self.steps_done = step
        self.stop_reason = self._stop.reason() if step < self.max_steps else None
        requests = self._plugins.step_end(step)
        self._end_by_plugin(requests.stops)
        saves = self._is_save_step(step) or requests.saves
        eval_steps = self.run.options.training.eval_steps
        evaluates = self._val is not None and (
            requests.evaluates or (self._is_every(eval_steps) if eval_steps else saves)
        )
        if evaluates:
            self._plugins.eval_begin()
        record = StepRecord(
            step,
            batches,
            metrics,
            result,
            learning_rate,
            self._data_wait,
            skips_update,
            evaluates,
            (saves or self.stop_reason is not None) and not self._is_trial,
        )
        for callback in self._callbacks:
            callback.post_step(record)
        self._end_by_plugin(self._plugins.stops_after_saving(record))

    def _end_by_plugin(self, is_requested: bool) -> None:
        if is_requested and self.steps_done < self.max_steps and self.stop_reason is None:
            self.stop_reason, self._is_ended_by_plugin = "by a callback (--callbacks)", True

    def _is_every(self, steps: int) -> bool:
        return self.steps_done % steps == 0 or self.steps_done == self.max_steps

    def _is_save_step(self, step: int) -> bool:
        if self.run.options.checkpoint.save_strategy == "steps":
            return self._is_every(self.run.options.checkpoint.save_steps)
        return step == self.max_steps or self._train.epoch != self._epoch

    def _fail(self, error: Exception) -> None:
        """Diagnose the failure, free servers and finish a pending checkpoint, without hiding the error."""
        with suppress(Exception):
            self._eval_command.stop()
        if isinstance(error, NonFiniteError):
            with suppress(Exception), self.watchdog.phase("the step that was not finite, once more"):
                diagnosis = rerun_step(self.state, self.objective.loss, self.objective.output)
                error.args = (f"{error}. {diagnosis}",)
        with suppress(Exception):
            if self.objective.loop:
                self.objective.loop.release()
        with suppress(OSError, RuntimeError):
            self._checkpointer.wait()  # threads write it, independent of the ranks' main threads
        if isinstance(error, NonFiniteError):
            self._close_log({"stopped": str(error)})

    def _finish(self) -> None:
        self.watchdog.phase("the end of training")
        if self.objective.loop:
            self.objective.loop.close()
        if self.stop_reason is None:
            self._eval_command.finish()
        self._eval_command.stop()
        barrier()
        self.watchdog.close()
        if self.stop_reason is None or self._is_ended_by_plugin:
            self._stop.close()
        if self.stop_reason is not None:
            self.log.note(
                f"Stopped after step {self.steps_done} of {self.max_steps}: {self.stop_reason}. "
                "Set --resume_from_checkpoint auto to resume."
            )
        stopped = {"stopped": self.stop_reason} if self.stop_reason else {}
        self._close_log(stopped)

    def _close_log(self, summary: JsonObject) -> None:
        """Write the summary and, on the rank that writes the log, the report."""
        last = {f"last_{name}": str(path) for name, path in self._checkpointer.last.items()}
        self.log.close(summary | {"last_checkpoint": None} | last)
        if self.run.writes:
            write_report(self.run.folder, self.log.note)

    @property
    def last_checkpoint(self) -> Path | None:
        """Folder of the last complete checkpoint."""
        return self._checkpointer.last.get("checkpoint")
