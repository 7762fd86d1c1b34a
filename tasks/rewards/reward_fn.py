"""A reward: what its function is given, and what it may return."""

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

from ...templates.plural import plural
from ..system.plugins import Daemons, file_of

OWN = ("completions", "completion_ids", "response_token_ids", "prompt", "messages", "rollout_infos")


class RewardError(RuntimeError):
    """A reward did not do what it has to: names it, what it was about, and the cure."""


@dataclass(frozen=True)
class Sample:
    """A completion, and what rewards may ask for."""

    place: str  # of its row, to name it in an error
    prompt: str
    messages: list[dict[str, Any]]  # that led to the completion
    completion: str  # from where the assistant's turn begins; of several turns the last
    completion_ids: list[int]  # that the model drew, in all turns
    columns: dict[str, Any]  # of its row; give each sample all that the dataset has, None where a row has it not
    said: list[dict[str, Any]] | None = None  # messages behind the prompt's; none: the completion alone
    info: dict[str, Any] = field(default_factory=dict)  # of an episode of several turns

    def __str__(self) -> str:
        return f"{self.place}, completion {self.completion[:200]!r}"


class Reward:
    """A function by its name. A function that is async has one event loop, in which its sessions may stay open."""

    def __init__(self, name: str, function: Callable):
        self.name, self.function = name, function
        self.file = file_of(function)
        parameters = inspect.signature(function).parameters.values()
        self._all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {p.name for p in named}
        self.needs = [p.name for p in named if p.default is p.empty and p.name not in OWN]  # columns
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: Any = None  # the coroutine that is awaited

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ValueError where the function wants a column that is not among those of the dataset."""
        for name in self.needs:
            if name not in columns:
                there = ", ".join(sorted(columns)) or "none"
                raise ValueError(
                    f"--reward_funcs {self.name} wants the column {name}, and the columns of the dataset are: {there}. "
                    f'Add it, or rename one (--columns \'{{"old": "{name}"}}\')'
                )

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """What the function returns."""
        result = self.function(**self._arguments(samples))
        if not inspect.isawaitable(result):
            return result
        if self._loop is None or self._loop.is_running():  # running: a call that hangs has it
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(Daemons())
        self._waiting = result
        return self._loop.run_until_complete(_wait(result))

    def frame(self, thread: int) -> FrameType | None:
        """Where a call of it is that runs in a thread."""
        return getattr(self._waiting, "cr_frame", None) or sys._current_frames().get(thread)

    def _arguments(self, samples: Sequence[Sample]) -> dict[str, list]:
        columns = {name for sample in samples for name in sample.columns}
        ids = [sample.completion_ids for sample in samples]
        lists = {name: [sample.columns.get(name) for sample in samples] for name in columns} | {
            "completions": [sample.completion for sample in samples],
            "completion_ids": ids,
            "response_token_ids": ids,  # as ms-swift calls them
            "prompt": [sample.prompt for sample in samples],
            "messages": [[*s.messages, *(s.said or [{"role": "assistant", "content": s.completion}])] for s in samples],
            "rollout_infos": [sample.info for sample in samples],
        }
        return lists if self._all else {name: lists[name] for name in self._names & lists.keys()}

    def values(self, result: Any, samples: Sequence[Sample]) -> np.ndarray:
        """What the function returned, float64 [samples], None as NaN. Raises RewardError where it is no such thing."""
        try:
            values = list(result)
        except TypeError:
            raise self._wrong(f"returned a {type(result).__name__}", samples) from None
        if len(values) != len(samples):
            raise self._wrong(f"returned {len(values)} values", samples)
        for value, sample in zip(values, samples, strict=True):
            if value is not None and not _is_finite(value):
                raise RewardError(
                    f"--reward_funcs {self.name} returned {value!r} for {sample}. Have it return a finite number, or "
                    "None where it has nothing to say of a completion"
                )
        return np.array([math.nan if value is None else float(value) for value in values])

    def _wrong(self, what: str, samples: Sequence[Sample]) -> RewardError:
        return RewardError(
            f"--reward_funcs {self.name} {what} for {plural(len(samples), 'completion')} (the first is of "
            f"{samples[0]}). Have it "
            "return a list with a number, or None, for each"
        )


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(value)
    except (TypeError, ValueError):
        return False


async def _wait(result: Any) -> Any:
    return await result
