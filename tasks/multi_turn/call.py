"""Calls of a multi-turn scheduler for the answers of all episodes. Errors name the failed call.

The scheduler runs in a thread with its own event loop, which can keep sessions open. A sync scheduler is called for one
episode after the other, an async one for all concurrently.
"""

import asyncio
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from ...templates.formats.replies import to_replies
from ...templates.formats.schemas import UnusableRow
from ...templates.json_types import JsonObject
from ..system.ms_swift_imports import ms_swift_imports
from ..system.plugins import DaemonExecutor, file_of, line_of
from .registry import EditedAnswer, Turn

GRACE = 1.0  # seconds beyond the timeout, if the event loop itself is blocked
ROLES = "user", "tool", "system"


class TurnError(RuntimeError):
    """Failure of a scheduler. The message names the scheduler, the row, the turn and the fix."""


@dataclass(frozen=True)
class SchedulerCall:
    """Argument of a scheduler call: the model's answer in an episode."""

    row: str  # description of the row, for errors
    turn: Turn

    def __str__(self) -> str:
        return f"{self.row}, turn {self.turn.number}, completion {self.turn.completion[:200]!r}"


@dataclass
class EpisodeStart:
    """Episode before the first answer, whose messages a scheduler may change."""

    row: str  # description of the row, for errors
    request_id: str
    messages: list[JsonObject]
    columns: JsonObject

    def __str__(self) -> str:
        return f"{self.row}, before the first answer"


class Scheduler:
    """Scheduler with its name and timeout.

    `has_own_timeouts`: the scheduler enforces its own timeouts, and may take longer than `timeout`.
    """

    def __init__(self, name: str, function: Callable, timeout: float, *, has_own_timeouts: bool = False):
        self.name, self._function, self._timeout = name, function, timeout
        self._call_timeout = None if has_own_timeouts else timeout
        self._file = file_of(getattr(function, "scheduler", function))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        import torch  # the command line imports this file without torch

        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._current: SchedulerCall | EpisodeStart | None = None  # the last started call
        self._progress_time = 0.0  # last time that the loop was responsive or a call was started

    def __call__(self, calls: Sequence[SchedulerCall]) -> list[list[JsonObject] | EditedAnswer]:
        """Return the next messages of each episode; empty if the episode is over. Raises TurnError."""
        return self._run_in_loop(self._call_all(calls))

    @property
    def starts_episodes(self) -> bool:
        """Whether the scheduler may change an episode's prompt before the first answer."""
        return getattr(self._function, "starts_episodes", False)

    def start(self, episodes: Sequence[EpisodeStart]) -> None:
        """Let the scheduler change the messages of each prompt. Raises TurnError."""
        if episodes:
            self._run_in_loop(self._start_all(episodes))

    def _run_in_loop(self, coroutine: Coroutine) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(DaemonExecutor())
            self._thread = threading.Thread(target=self._run, name=f"scheduler {self.name}", daemon=True)
            self._thread.start()
        self._progress_time = time.monotonic()
        with ms_swift_imports():
            return self._wait(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def _wait(self, answers: Future) -> Any:
        """Return the result. Raises TurnError if the loop is blocked for longer than the timeout."""
        while True:
            try:
                return answers.result(timeout=min(1.0, self._timeout / 4))
            except TimeoutError:
                if answers.done():
                    raise
                if time.monotonic() - self._progress_time > self._timeout + GRACE:
                    assert self._current is not None
                    raise self._timeout_error(self._current) from None

    def _run(self) -> None:
        assert self._loop is not None
        if self._device is not None:
            import torch

            torch.cuda.set_device(self._device)  # a new thread starts with device 0
        self._loop.run_forever()

    async def _start_all(self, episodes: Sequence[EpisodeStart]) -> None:
        self._current, heartbeat = episodes[0], asyncio.ensure_future(self._heartbeat())
        future = asyncio.ensure_future(self._function.start(episodes))
        try:
            done, _ = await asyncio.wait({future}, timeout=self._call_timeout)
            if not done:
                raise self._timeout_error(episodes[0], future)
            future.result()
        except (TurnError, asyncio.CancelledError):
            raise
        except BaseException as error:  # also SystemExit, which would end only this thread
            raise self._exception_error(error, episodes[0]) from error
        finally:
            heartbeat.cancel()
            future.cancel()

    async def _call_all(self, calls: Sequence[SchedulerCall]) -> list[list[JsonObject] | EditedAnswer]:
        heartbeat = asyncio.ensure_future(self._heartbeat())
        tasks = [asyncio.ensure_future(self._call_one(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in (heartbeat, *tasks):
                task.cancel()

    async def _heartbeat(self) -> None:
        while True:
            self._progress_time = time.monotonic()
            await asyncio.sleep(self._timeout / 8)

    async def _call_one(self, call: SchedulerCall) -> list[JsonObject] | EditedAnswer:
        self._current, self._progress_time = call, time.monotonic()
        future: asyncio.Future | None = None
        try:
            result = self._function(call.turn)
            if inspect.isawaitable(result):
                future = asyncio.ensure_future(result)
                done, _ = await asyncio.wait({future}, timeout=self._call_timeout)
                if not done:
                    raise self._timeout_error(call, future)
                result = future.result()
        except (TurnError, asyncio.CancelledError):
            raise
        except BaseException as error:  # also SystemExit, which would end only this thread
            raise self._exception_error(error, call) from error
        finally:
            if future is not None:
                future.cancel()
        if isinstance(result, EditedAnswer):
            return replace(result, messages=self._messages(result.messages, call))
        return self._messages(result, call)

    def _exception_error(self, error: BaseException, call: SchedulerCall | EpisodeStart) -> TurnError:
        return TurnError(
            f"--multi_turn_scheduler {self.name} raised {type(error).__name__}: {error} "
            f"({line_of(error.__traceback__, self._file)}) for {call}. Fix it"
        )

    def _messages(self, result: Any, call: SchedulerCall) -> list[JsonObject]:
        """Convert a scheduler's result to messages. Raises TurnError."""
        messages = {str: lambda: [{"role": "user", "content": result}], dict: lambda: [result]}
        reply = messages[type(result)]() if type(result) in messages else result
        if reply is None:
            reply = []
        try:
            if not isinstance(reply, list | tuple) or not all(isinstance(message, dict) for message in reply):
                raise UnusableRow("it must return None, a text, a message or a list of messages")
            reply = to_replies(reply)
            if reserved_roles := [message["role"] for message in reply if message["role"] not in ROLES]:
                raise UnusableRow(f"the role {reserved_roles[0]} is reserved for the model")
            json.dumps([reply, call.turn.info])
        except (UnusableRow, TypeError, ValueError) as error:
            raise TurnError(
                f"--multi_turn_scheduler {self.name} returned {repr(result)[:200]} for {call}: {error}. Fix it"
            ) from None
        return reply

    def _timeout_error(self, call: SchedulerCall | EpisodeStart, task: asyncio.Future | None = None) -> TurnError:
        """Return the error of a call that hangs, with the line where it waits or blocks the loop."""
        assert self._thread is not None
        stack = task.get_stack(limit=1) if isinstance(task, asyncio.Task) else []
        line = line_of(stack[0] if stack else _frame(self._thread), self._file)
        return TurnError(
            f"--multi_turn_scheduler {self.name} did not return within {self._timeout:g} s (it is at {line}) for "
            f"{call}. Fix it, or raise --turn_timeout"
        )


def _frame(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0)
