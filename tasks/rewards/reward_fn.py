"""Reward functions: their arguments and results."""

import asyncio
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

from ...templates.formats.medium import Medium
from ...templates.json_types import JsonObject
from ...templates.plural import plural
from ..system.ms_swift_imports import ms_swift_imports
from ..system.plugins import DaemonExecutor, file_of
from .registry import ORM

BUILT_IN = (
    "completions", "completion_ids", "response_token_ids", "prompt", "messages", "rollout_infos", "finish_reason",
    "is_truncated", "prompt_id", "request_id", "trajectory_inputs", "trainer_state",
)  # fmt: skip


class RewardError(RuntimeError):
    """Failure of a reward. The message names the reward, the sample and the fix."""


@dataclass(frozen=True)
class RewardSample:
    """Completion, and the values that rewards may read."""

    row: str  # description of the row, for errors
    prompt: str
    messages: list[JsonObject]  # of the prompt
    completion: str  # the last turn of the assistant
    completion_ids: list[int]  # generated tokens of all turns
    columns: JsonObject  # of its row; every sample has all columns, None where the row lacks one
    replies: list[JsonObject] | None = None  # messages after the prompt; None: only the completion
    info: JsonObject = field(default_factory=dict)  # `turn.info` of a multi-turn episode
    finish_reason: str = "stop"  # "length": the completion was truncated
    prompt_id: str = ""
    request_id: str = ""
    media: Sequence[Medium] = ()  # in the order of the tags in the messages

    def __str__(self) -> str:
        return f"{self.row}, completion {self.completion[:200]!r}"


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run, as rewards of ms-swift read it."""

    global_step: int  # completed steps
    max_steps: int


class Reward:
    """Reward function with its name. An async function keeps one event loop, so its sessions can stay open.

    A function with the attribute `reads_samples` gets the samples themselves.
    """

    def __init__(self, name: str, function: Callable):
        self.name, self.function = name, function
        self.file = file_of(function)
        self._reads_samples = getattr(function, "reads_samples", False)
        parameters = [] if self._reads_samples else inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in keywords}
        # ms-swift passes the completions by position, so their parameter may have any name.
        positional = [p.name for p in keywords if p.kind is p.POSITIONAL_OR_KEYWORD]
        takes_completions = not isinstance(function, ORM) or "completions" in self._names or not positional
        self._completions = "completions" if takes_completions else positional[0]
        built_in = {*BUILT_IN, self._completions}
        self.required_columns = [p.name for p in keywords if p.default is p.empty and p.name not in built_in]
        # Groups of columns of which one is enough: an attribute of the function.
        self.required_alternatives: list[tuple[str, ...]] = [
            *((name,) for name in self.required_columns),
            *getattr(function, "required_alternatives", ()),
        ]
        self.trainer_state: TrainerState | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coroutine: Awaitable | None = None  # the awaited coroutine

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError if the function requires a column that the dataset lacks."""
        for names in self.required_alternatives:
            if set(columns).isdisjoint(names):
                available = ", ".join(sorted(columns)) or "none"
                raise ValueError(
                    f"--reward_funcs {self.name}: it requires the column {' or '.join(names)}, and the dataset has "
                    f'{available}. Add it, or rename one (--columns \'{{"old": "{names[0]}"}}\')'
                )

    def __call__(self, samples: Sequence[RewardSample]) -> object:
        """Return the function's result."""
        with ms_swift_imports():
            return self._call(samples)

    def _call(self, samples: Sequence[RewardSample]) -> object:
        result = self.function(samples) if self._reads_samples else self.function(**self._arguments(samples))
        if not inspect.isawaitable(result):
            return result
        if self._loop is None or self._loop.is_running():  # a hanging call still runs in it
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(DaemonExecutor())
        self._coroutine = result
        return self._loop.run_until_complete(_wait(result))

    def frame(self, thread: int) -> FrameType | None:
        """Return the current frame of a call in this thread."""
        return getattr(self._coroutine, "cr_frame", None) or sys._current_frames().get(thread)

    def _arguments(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        columns = {name for sample in samples for name in sample.columns}
        ids = [sample.completion_ids for sample in samples]
        arguments = {name: [sample.columns.get(name) for sample in samples] for name in columns} | {
            self._completions: [sample.completion for sample in samples],
            "completion_ids": ids,
            "response_token_ids": ids,  # ms-swift's name
            "prompt": [sample.prompt for sample in samples],
            "messages": [
                [*s.messages, *(s.replies or [{"role": "assistant", "content": s.completion}])] for s in samples
            ],
            "rollout_infos": [sample.info for sample in samples],
            "finish_reason": [sample.finish_reason for sample in samples],
            "is_truncated": [sample.finish_reason == "length" for sample in samples],
            "prompt_id": [sample.prompt_id for sample in samples],
            "request_id": [sample.request_id for sample in samples],
        }
        rows = [{name: values[i] for name, values in arguments.items()} for i in range(len(samples))]
        arguments["trajectory_inputs"] = {row["request_id"]: [row] for row in rows}
        arguments["trainer_state"] = self.trainer_state
        return arguments if self._takes_all else {name: arguments[name] for name in self._names & arguments.keys()}

    def values(self, result: object, samples: Sequence[RewardSample]) -> np.ndarray:
        """Return the result as float64 [samples] with NaN for None. Raises RewardError for an invalid one."""
        try:
            values: list[float | None] = list(result)  # pyright: ignore[reportArgumentType]
        except TypeError:
            raise self._result_error(f"returned a {type(result).__name__}", samples) from None
        if len(values) != len(samples):
            raise self._result_error(f"returned {len(values)} values", samples)
        for value, sample in zip(values, samples, strict=True):
            if value is not None and not _is_finite(value):
                raise RewardError(
                    f"--reward_funcs {self.name} returned {value!r} for {sample}. Fix it to return a finite number, or "
                    "None for a completion that it cannot score"
                )
        return np.array([math.nan if value is None else float(value) for value in values])

    def _result_error(self, problem: str, samples: Sequence[RewardSample]) -> RewardError:
        return RewardError(
            f"--reward_funcs {self.name} {problem} for {plural(len(samples), 'completion')} (the first is of "
            f"{samples[0]}). Fix it "
            "to return a list with a number or None for each"
        )


def _is_finite(value: object) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return False


async def _wait(result: Awaitable) -> object:
    return await result
