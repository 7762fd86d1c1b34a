"""Registries and base classes of plugins' training callbacks (--callbacks), as in ms-swift. No torch at import."""

from collections.abc import Iterable
from typing import Any

from ...templates.json_types import JsonObject
from ..system.plugins import unknown_name_error

megatron_callbacks_map: JsonObject = {}  # of classes like MegatronCallback
callbacks_map: JsonObject = {}  # of classes like transformers.TrainerCallback
BUILT_IN = ("print", "default_flow")  # ms-swift's log on the terminal and its saving, which every run has
HOOKS = (
    "on_train_begin", "on_train_end", "on_step_begin", "on_step_end", "on_log", "on_eval_begin", "on_eval_end",
    "on_evaluate", "on_save", "on_epoch_begin", "on_epoch_end", "on_init_end",
)  # fmt: skip
NOT_CALLED = (
    "on_eval_step", "on_prediction_step", "on_predict", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step",
    "on_push_begin",
)  # fmt: skip


class MegatronCallback:
    """Base class of callbacks. Every rank has an instance and calls the hooks in the same order.

    `trainer` has `args` (all flags), `state`, `wrapped_models`, `unwrapped_models` and `optimizer`.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.args, self.state = trainer, trainer.args, trainer.state

    def on_train_begin(self) -> None: ...

    def on_train_end(self) -> None: ...

    def on_step_begin(self) -> None: ...

    def on_step_end(self) -> None:
        """Run after a step. `state.should_save`, `should_eval` and `should_training_stop` may be set."""

    def on_log(self, logs: JsonObject) -> None:
        """Run after a line of the log. `logs["step"]` is the step that it is of."""

    def on_eval_begin(self) -> None: ...

    def on_eval_end(self) -> None: ...

    def on_eval_step(self) -> None: ...

    def on_save(self, output_dir: str) -> None:
        """Run after a checkpoint; with --async_save true before it is complete."""


class TrainerCallback:
    """Base class of callbacks with the hooks of transformers.TrainerCallback: `hook(args, state, control, **kwargs)`.

    It does not derive from transformers' class, which takes seconds to import; those that do work as well.
    """

    def __init__(self, args: Any, trainer: Any):
        self.args, self.trainer = args, trainer


def check_callbacks(names: Iterable[str]) -> None:
    """Raise ValueError for a name that no plugin has registered, or a hook that would not be called."""
    for name in names:
        if name in BUILT_IN:
            continue
        known = [*megatron_callbacks_map, *callbacks_map]
        if name not in known:
            raise unknown_name_error("--callbacks", name, known, "callback")
        entry = megatron_callbacks_map.get(name) or callbacks_map[name]
        methods = {method for owner in entry.__mro__ if _is_user_s(owner) for method in vars(owner)}
        for method in NOT_CALLED:
            if method in methods:
                raise ValueError(
                    f"--callbacks {name}: its {method}() would never be called, only {', '.join(HOOKS)}. Remove it"
                )


def _is_user_s(owner: type) -> bool:
    return owner.__module__.partition(".")[0] not in ("megaswift", "transformers", "builtins")
