"""A scheduler by its name, asked about the answers of all episodes at a time; errors that say which failed, for what.

It runs in a thread with an event loop of its own, in which its sessions may stay open. A scheduler that is sync is
called for one episode after the other, one that is async for all at the same time.
"""

import asyncio
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...templates.formats.schemas import UnusableRow, from_messages
from ..system.plugins import Daemons, file_of, place_of
from .registry import Turn

LATE = 1.0  # seconds that an answer may be late beyond the timeout, where the loop itself is held up
ROLES = "user", "tool", "system"


class TurnError(RuntimeError):
    """A scheduler did not do what it has to: names it, the row, the turn and the cure."""


@dataclass(frozen=True)
class Asked:
    """A scheduler is asked about an answer."""

    place: str  # of its row
    turn: Turn

    def __str__(self) -> str:
        return f"{self.place}, turn {self.turn.number}, completion {self.turn.completion[:200]!r}"


class Scheduler:
    """`bounds_itself`: its answers may take longer than `timeout`, since they have timeouts of their own."""

    def __init__(self, name: str, function: Callable, timeout: float, *, bounds_itself: bool = False):
        self.name, self._function, self._timeout = name, function, timeout
        self._bound = None if bounds_itself else timeout
        self._file = file_of(function)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        import torch  # which the command line, that looks for schedulers, does without

        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._at: Asked | None = None  # the last that was begun
        self._since = 0.0  # when the loop was last seen to go round, or that was begun

    def __call__(self, asked: Sequence[Asked]) -> list[list[dict[str, Any]]]:
        """What each is told: messages, none where its episode is over. Raises TurnError."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(Daemons())
            self._thread = threading.Thread(target=self._run, name=f"scheduler {self.name}", daemon=True)
            self._thread.start()
        self._since = time.monotonic()
        answers = asyncio.run_coroutine_threadsafe(self._all(asked), self._loop)
        while True:
            try:
                return answers.result(timeout=min(1.0, self._timeout / 4))
            except TimeoutError:
                if answers.done():
                    raise
                if time.monotonic() - self._since > self._timeout + LATE:
                    assert self._at is not None
                    raise self._late(self._at) from None

    def _run(self) -> None:
        assert self._loop is not None
        if self._device is not None:
            import torch

            torch.cuda.set_device(self._device)  # a new thread begins with the first
        self._loop.run_forever()

    async def _all(self, asked: Sequence[Asked]) -> list[list[dict[str, Any]]]:
        beat = asyncio.ensure_future(self._beat())
        tasks = [asyncio.ensure_future(self._one(each)) for each in asked]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in (beat, *tasks):
                task.cancel()

    async def _beat(self) -> None:
        while True:
            self._since = time.monotonic()
            await asyncio.sleep(self._timeout / 8)

    async def _one(self, asked: Asked) -> list[dict[str, Any]]:
        self._at, self._since = asked, time.monotonic()
        awaited: Any = None
        try:
            result = self._function(asked.turn)
            if inspect.isawaitable(result):
                awaited = asyncio.ensure_future(result)
                done, _ = await asyncio.wait({awaited}, timeout=self._bound)
                if not done:
                    raise self._late(asked, awaited)
                result = awaited.result()
        except (TurnError, asyncio.CancelledError):
            raise
        except BaseException as error:  # SystemExit too: it would end this thread alone
            raise TurnError(
                f"--multi_turn_scheduler {self.name} raised {type(error).__name__}: {error} "
                f"({place_of(error.__traceback__, self._file)}) for {asked}. Fix it"
            ) from error
        finally:
            if awaited is not None:
                awaited.cancel()
        return self._messages(result, asked)

    def _messages(self, result: Any, asked: Asked) -> list[dict[str, Any]]:
        """What a scheduler returned, as messages. Raises TurnError."""
        messages = {str: lambda: [{"role": "user", "content": result}], dict: lambda: [result]}
        found = messages[type(result)]() if type(result) in messages else result
        if found is None:
            found = []
        try:
            if not isinstance(found, list | tuple) or not all(isinstance(message, dict) for message in found):
                raise UnusableRow("None, a text, a message or a list of messages is expected")
            found = from_messages(list(found)).messages
            if other := [message["role"] for message in found if message["role"] not in ROLES]:
                raise UnusableRow(f"the {other[0]}'s turn is the model's own")
            json.dumps([found, asked.turn.info])
        except (UnusableRow, TypeError, ValueError) as error:
            raise TurnError(
                f"--multi_turn_scheduler {self.name} returned {repr(result)[:200]} for {asked}: {error}. Fix it"
            ) from None
        return found

    def _late(self, asked: Asked, task: Any = None) -> TurnError:
        """Of one that hangs: where it waits, or what holds up the loop."""
        assert self._thread is not None
        frame = task.get_stack(limit=1)[0] if task is not None and task.get_stack(limit=1) else None
        return TurnError(
            f"--multi_turn_scheduler {self.name} has not answered within {self._timeout:g} s (it is at "
            f"{place_of(frame or _frame(self._thread), self._file)}) for {asked}. Fix it, or raise --turn_timeout"
        )


def _frame(thread: threading.Thread) -> Any:
    return sys._current_frames().get(thread.ident or 0)
