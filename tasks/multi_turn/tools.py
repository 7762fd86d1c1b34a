"""--multi_turn_scheduler tools: functions that the model calls, and whose results it is told.

A call has the form of Hermes and Qwen: <tool_call>{"name": "...", "arguments": {...}}</tool_call>
"""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...templates.formats.schemas import Conversation, with_columns
from ..system.plugins import Daemons
from .registry import Turn

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def schema_of(function: Callable) -> dict[str, Any]:
    """What the chat template is given of a tool. Raises ValueError where hints or docstring do not say enough."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"@tool {function.__name__}: {error}. It needs type hints, and a docstring that describes it and, under "
            "`Args:`, each argument"
        ) from None


class Tools:
    """A scheduler. `timeout`: seconds that a call may take; sync functions are called one after another, async ones of
    all episodes at the same time."""

    def __init__(self, tools: Mapping[str, Callable], timeout: float):
        self._tools, self._timeout = tools, timeout
        self._daemons, self._one_at_a_time = Daemons(), asyncio.Lock()

    async def __call__(self, turn: Turn) -> list[dict[str, Any]] | None:
        calls = CALL.findall(turn.raw)
        allowed = self._allowed(turn.columns)
        turn.info["tool_calls"] = turn.info.get("tool_calls", 0) + len(calls)
        turn.info.setdefault("tool_errors", 0)
        if not calls or turn.final:
            return None
        messages = []
        for call in calls:
            name, text, fails = await self._called(call, allowed)
            turn.info["tool_errors"] += fails
            messages.append({"role": "tool", "name": name, "content": text})
        return messages

    def _allowed(self, columns: dict[str, Any]) -> Mapping[str, Callable]:
        """Those that the row names, where it does. Raises ValueError where there is no such function."""
        named = with_columns(Conversation([{"role": "user", "content": ""}], [None]), columns | {"system": None}).tools
        if not named:
            return self._tools
        names = [each.get("function", each).get("name") for each in named]
        if lacking := [name for name in names if name not in self._tools]:
            there = ", ".join(self._tools) or "none"
            raise ValueError(f"the row's column `tools` names {lacking[0]}, which no @tool is. There are: {there}")
        return {name: self._tools[name] for name in names}

    async def _called(self, text: str, tools: Mapping[str, Callable]) -> tuple[str, str, bool]:
        """The tool's name, what the model is told, and whether it is an error."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", {})
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError):
            return "tool", 'Error: a call is JSON of this form: {"name": "...", "arguments": {...}}', True
        if name not in tools:
            return name, f"Error: there is no tool {name}. There are: {', '.join(tools)}", True
        try:
            inspect.signature(tools[name]).bind(**arguments)
            found = await self._result(tools[name], arguments)
        except TimeoutError:
            return name, f"Error: no answer within {self._timeout:g} s", True
        except Exception as error:  # of any kind: the model is to learn from it
            return name, f"Error: {type(error).__name__}: {error}", True
        return name, found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str), False

    async def _result(self, function: Callable, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await asyncio.wait_for(function(**arguments), self._timeout)
        async with self._one_at_a_time:  # one that hangs is left behind
            loop = asyncio.get_running_loop()
            return await asyncio.wait_for(
                loop.run_in_executor(self._daemons, _guarded, function, arguments), self._timeout
            )


def _guarded(function: Callable, arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except SystemExit as error:
        raise RuntimeError(f"it ended the program ({error})") from None
