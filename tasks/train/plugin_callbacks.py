"""Training callbacks of plugins (--callbacks), called by the trainer.

Every rank calls the same hooks in the same order. What a callback of one rank asks for (to stop, save or evaluate)
holds on all.
"""

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...bridge.option_groups import flag_values
from ..distributed.collectives import gloo_group
from ..run.context import Run
from ..run.resume import best_metric, is_greater_better
from ..system.ms_swift_imports import ms_swift_imports
from ..system.plugins import file_of, line_of, load_plugins
from .callback_registry import BUILT_IN, callbacks_map, check_callbacks, megatron_callbacks_map
from .callbacks import Callback, StepRecord
from .checkpointer import Checkpointer
from .step import TrainState


class Requests(NamedTuple):
    """Requests of callbacks after a step."""

    stops: bool = False
    saves: bool = False
    evaluates: bool = False


@dataclass
class CallbackState:
    """Progress of the run, with transformers' and ms-swift's names, and what callbacks ask for."""

    global_step: int
    max_steps: int
    epoch: float = 0.0
    best_metric: float | None = None
    best_global_step: int | None = None
    last_model_checkpoint: str | None = None
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    should_save: bool = False
    should_eval: bool = False
    should_training_stop: bool = False

    @property
    def iteration(self) -> int:
        return self.global_step


@dataclass
class PluginTrainer:
    """View of the trainer for callbacks."""

    args: SimpleNamespace
    state: CallbackState
    wrapped_models: list[Any]
    unwrapped_models: list[Any]
    optimizer: Any


class PluginCallbacks(Callback):
    """The callbacks of --callbacks. Without any it does nothing."""

    def __init__(self, run: Run, training: TrainState, checkpointer: Checkpointer, first_step: int, max_steps: int):
        names = [name for name in run.options.plugins.callbacks if name not in BUILT_IN]
        self._state = CallbackState(first_step - 1, max_steps)
        self._callbacks: list[tuple[str, Any]] = []
        self._checkpointer, self._training, self._epoch = checkpointer, training, None
        if not names:
            return
        self._metric, self._is_greater_better = best_metric(run.options), is_greater_better(run.options)
        self._state.is_world_process_zero = self._state.is_local_process_zero = dist.get_rank() == 0
        load_plugins(run.options.plugins.external_plugins)
        check_callbacks(names)
        self._control = _control()
        self._args = SimpleNamespace(
            **flag_values(run.options)
            | {"output_dir": str(run.folder), "greater_is_better": self._is_greater_better}
            | {"metric_for_best_model": self._metric}
        )
        chunks = list(training.chunks)
        unwrapped = [getattr(chunk, "module", chunk) for chunk in chunks]
        trainer = PluginTrainer(self._args, self._state, chunks, unwrapped, training.optimizer)
        with ms_swift_imports():
            self._callbacks = [(name, _instance(name, self._args, trainer)) for name in names]
        self._call("on_init_end")

    def train_begin(self) -> None:
        self._call("on_train_begin")

    def train_end(self) -> None:
        self._call("on_train_end")

    def pre_step(self, step: int) -> None:
        self._call("on_step_begin")

    def begin_epoch(self, epoch: int) -> None:
        """Call the hooks of epochs if `epoch` is a new one."""
        if epoch == self._epoch:
            return
        if self._epoch is not None:
            self._call("on_epoch_end")
        self._epoch, self._state.epoch = epoch, float(epoch)
        self._call("on_epoch_begin")

    def step_end(self, step: int) -> Requests:
        """Call the hooks after a step. Return what callbacks of any rank ask for."""
        if not self._callbacks:
            return Requests()
        self._state.global_step = step
        self._call("on_step_end")
        return self._requests()

    def stops_after_saving(self, record: StepRecord) -> bool:
        """Return whether a hook after the checkpoint of this step asks to stop."""
        return record.saves and bool(self._callbacks) and self._requests().stops

    def _requests(self) -> Requests:
        state, control = self._state, self._control
        flags = torch.tensor(
            [
                state.should_training_stop or control.should_training_stop,
                state.should_save or control.should_save,
                state.should_eval or control.should_evaluate,
            ],
            dtype=torch.int32,
        )
        if dist.get_world_size() > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, gloo_group())
        state.should_save = state.should_eval = control.should_save = control.should_evaluate = False
        return Requests(*map(bool, flags.tolist()))

    def eval_begin(self) -> None:
        self._call("on_eval_begin")

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Call the hooks after an evaluation."""
        self._call("on_eval_end")
        self._call("on_evaluate", metrics=dict(metrics))
        self.logged(step, metrics)

    def logged(self, step: int, values: dict[str, float]) -> None:
        """Call the hooks after a line of the log of `step`."""
        self._call("on_log", logs={"step": step, **values})

    def post_step(self, record: StepRecord) -> None:
        """Call the hooks after an evaluation and a checkpoint. It comes after their callbacks."""
        if not self._callbacks:
            return
        if record.evaluates:
            self._note_best(record)
            self.evaluated(record.step, record.eval_metrics)
        if record.saves:
            folder = self._checkpointer.folder(record.step)
            self._state.last_model_checkpoint = str(folder)
            self._call("on_save", output_dir=str(folder))

    def _note_best(self, record: StepRecord) -> None:
        value, best = record.eval_metrics.get(self._metric), self._state.best_metric
        if value is not None and (best is None or (value > best if self._is_greater_better else value < best)):
            self._state.best_metric, self._state.best_global_step = value, record.step

    def _call(self, hook: str, **arguments: Any) -> None:
        for name, callback in self._callbacks:
            function = getattr(callback, hook, None)
            if function is None:
                continue
            try:
                with ms_swift_imports():
                    if name in megatron_callbacks_map:
                        function(**arguments)
                    else:
                        self._call_like_transformers(function, arguments)
            except Exception as error:
                line = line_of(error.__traceback__, file_of(callback))
                raise RuntimeError(
                    f"--callbacks {name}: {hook} raised {type(error).__name__}: {error} ({line}). Fix it"
                ) from error

    def _call_like_transformers(self, function: Any, arguments: dict[str, Any]) -> None:
        arguments = arguments | {
            "model": self._training.chunks[0],
            "optimizer": self._training.optimizer,
            "lr_scheduler": self._training.schedule,
        }
        control = function(self._args, self._state, self._control, **arguments)
        self._control = self._control if control is None else control


def _control() -> Any:
    from transformers import TrainerControl

    return TrainerControl()


def _instance(name: str, args: SimpleNamespace, trainer: PluginTrainer) -> Any:
    """Return an instance. A class of `callbacks_map` gets args and trainer if its constructor has parameters."""
    if name in megatron_callbacks_map:
        return megatron_callbacks_map[name](trainer)
    entry = callbacks_map[name]
    return entry(args, trainer) if inspect.signature(entry).parameters else entry()
