"""Reward functions: their arguments and results."""

import asyncio
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import FrameType

import numpy as np

from ...templates.json_types import JsonObject
from ...templates.plural import plural
from ..system.ms_swift_imports import ms_swift_imports
from ..system.plugins import DaemonExecutor, file_of

BUILT_IN = ("completions", "completion_ids", "response_token_ids", "prompt", "messages", "rollout_infos")


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

    def __str__(self) -> str:
        return f"{self.row}, completion {self.completion[:200]!r}"


class Reward:
    """Reward function with its name. An async function keeps one event loop, so its sessions can stay open."""

    def __init__(self, name: str, function: Callable):
        self.name, self.function = name, function
        self.file = file_of(function)
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in keywords}
        self.required_columns = [p.name for p in keywords if p.default is p.empty and p.name not in BUILT_IN]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coroutine: Awaitable | None = None  # the awaited coroutine

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError if the function requires a column that the dataset lacks."""
        for name in self.required_columns:
            if name not in columns:
                available = ", ".join(sorted(columns)) or "none"
                raise ValueError(
                    f"--reward_funcs {self.name}: it requires the column {name}, and the dataset has {available}. "
                    f'Add it, or rename one (--columns \'{{"old": "{name}"}}\')'
                )

    def __call__(self, samples: Sequence[RewardSample]) -> object:
        """Return the function's result."""
        with ms_swift_imports():
            return self._call(samples)

    def _call(self, samples: Sequence[RewardSample]) -> object:
        result = self.function(**self._arguments(samples))
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

    def _arguments(self, samples: Sequence[RewardSample]) -> dict[str, list]:
        columns = {name for sample in samples for name in sample.columns}
        ids = [sample.completion_ids for sample in samples]
        lists = {name: [sample.columns.get(name) for sample in samples] for name in columns} | {
            "completions": [sample.completion for sample in samples],
            "completion_ids": ids,
            "response_token_ids": ids,  # ms-swift's name
            "prompt": [sample.prompt for sample in samples],
            "messages": [
                [*s.messages, *(s.replies or [{"role": "assistant", "content": s.completion}])] for s in samples
            ],
            "rollout_infos": [sample.info for sample in samples],
        }
        return lists if self._takes_all else {name: lists[name] for name in self._names & lists.keys()}

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
