"""Callback that saves checkpoints, and the state that they hold besides the weights."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..run.context import Run
from .callbacks import Callback, StepRecord
from .checkpointer import Checkpointer
from .objective import Data, Objective
from .step import TrainState, sum_over_ranks
from .step_logger import StepLogger
from .train_state import optimizer_numbers, rank_tensors


class SaveCallback(Callback):
    """Callback of `--save_steps`."""

    def __init__(
        self,
        run: Run,
        state: TrainState,
        objective: Objective,
        data: Data,
        logger: StepLogger,
        checkpointer: Checkpointer,
    ):
        self._run, self._state, self._objective, self._data = run, state, objective, data
        self._logger, self._checkpointer = logger, checkpointer

    def post_step(self, record: StepRecord) -> None:
        if not record.saves:
            return
        log = self._logger.log
        with log.meter.paused():
            began = time.perf_counter()
            tensors = self._rank_state()
            state = self._run_state(record.eval_metrics)  # after `_rank_state`, which waits for the device
            paths = self._checkpointer.save(record.step, state, tensors)
            log.saved(
                record.step, paths, time.perf_counter() - began, being_written=self._run.options.checkpoint.async_save
            )
            log.draw(overview_only=True)

    def _run_state(self, eval_metrics: dict[str, float]) -> dict[str, Any]:
        """Return the state that is equal on every rank, for JSON."""
        options, log, groups = self._run.options, self._logger.log, self._state.model.groups
        return {
            "tokens": log.meter.tokens,
            "spikes": log.spikes,
            "window_tokens": int(sum_over_ranks(groups, {}, [], self._logger.metrics.tokens).wait()[0]),
            "elapsed": log.elapsed(),
            "layout": self._run.layout,
            "began_from": self._run.began_from,
            "optimizer": None if options.checkpoint.no_save_optim else optimizer_numbers(self._state),
            "rng": not options.checkpoint.no_save_rng,
            "data": self._data.position(),
            "metrics": eval_metrics,
        }

    def _rank_state(self) -> dict[str, Tensor]:
        """Return this rank's tensors."""
        options = self._run.options
        saves_optimizer, saves_rng = not options.checkpoint.no_save_optim, not options.checkpoint.no_save_rng
        tensors = rank_tensors(self._state, self._run.hf_config, optimizer=saves_optimizer, rng=saves_rng)
        tensors |= self._logger.metrics.tensors()
        if self._objective.loop:
            loop_tensors = self._objective.loop.tensors()
            tensors |= loop_tensors if dist.get_rank() == 0 else {}
        groups = self._state.model.groups
        if groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0:
            tensors |= {name: torch.from_numpy(array) for name, array in self._data.cursors().items()}
        return tensors
