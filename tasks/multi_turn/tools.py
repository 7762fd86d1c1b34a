"""Scheduler of tool calls (--multi_turn_scheduler tools): runs the functions that the model calls.

Calls have the format of Hermes and Qwen: <tool_call>{"name": "...", "arguments": {...}}</tool_call>
"""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping

from ...templates.formats.media_rows import has_media
from ...templates.formats.medium import is_picture
from ...templates.formats.schemas import Conversation, with_columns
from ...templates.json_types import JsonObject
from ..system.plugins import DaemonExecutor
from .registry import Turn

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def schema_of(function: Callable) -> JsonObject:
    """Return a tool's schema for the chat template. Raises ValueError for missing type hints or documentation."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"@tool {function.__name__}: {error}. Add type hints, and a docstring that describes it and, under "
            "`Args:`, each argument"
        ) from None


class Tools:
    """Scheduler that runs tool calls. `timeout`: seconds per call.

    Sync functions run one after another, async functions of all episodes run concurrently.
    """

    def __init__(self, tools: Mapping[str, Callable], timeout: float):
        self._tools, self._timeout = tools, timeout
        self._executor, self._sync_lock = DaemonExecutor(), asyncio.Lock()

    async def __call__(self, turn: Turn) -> list[JsonObject] | None:
        calls = CALL.findall(turn.raw)
        row_tools = self._allowed_tools(turn.columns)
        turn.info["tool_calls"] = turn.info.get("tool_calls", 0) + len(calls)
        turn.info.setdefault("tool_errors", 0)
        if not calls or turn.final:
            return None
        messages = []
        for call in calls:
            name, content, is_error = await self._call(call, row_tools)
            turn.info["tool_errors"] += is_error
            messages.append({"role": "tool", "name": name, "content": content})
        return messages

    def _allowed_tools(self, columns: JsonObject) -> Mapping[str, Callable]:
        """Return the tools that the row names, by default all. Raises ValueError for an unknown tool."""
        schemas = with_columns(
            Conversation([{"role": "user", "content": ""}], [None]), columns | {"system": None}
        ).tools
        if not schemas:
            return self._tools
        names = [tool.get("function", tool).get("name") for tool in schemas]
        if unknown := [name for name in names if name not in self._tools]:
            registered = ", ".join(self._tools) or "none"
            raise ValueError(f"the row's column `tools` names {unknown[0]}, which is no @tool. Use one of {registered}")
        return {name: self._tools[name] for name in names}

    async def _call(self, text: str, tools: Mapping[str, Callable]) -> tuple[str, object, bool]:
        """Run a tool call. Return the tool's name, the content for the model, and whether it is an error."""
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
            result = await self._result(tools[name], arguments)
        except TimeoutError:
            return name, f"Error: no answer within {self._timeout:g} s", True
        except Exception as error:  # of any kind: the model reads and learns from it
            return name, f"Error: {type(error).__name__}: {error}", True
        return name, _content(result), False

    async def _result(self, function: Callable, arguments: JsonObject) -> object:
        if inspect.iscoroutinefunction(function):
            return await asyncio.wait_for(function(**arguments), self._timeout)
        async with self._sync_lock:  # a hanging call is abandoned
            loop = asyncio.get_running_loop()
            return await asyncio.wait_for(
                loop.run_in_executor(self._executor, _call_safely, function, arguments), self._timeout
            )


def _content(result: object) -> object:
    """Return a tool's result as the content of a message: text, a picture, content blocks with images, or JSON."""
    if is_picture(result):
        return [{"type": "image", "image": result}]
    is_content = isinstance(result, str) or has_media({"messages": [{"content": result}]})
    return result if is_content else json.dumps(result, ensure_ascii=False, default=str)


def _call_safely(function: Callable, arguments: JsonObject) -> object:
    try:
        return function(**arguments)
    except SystemExit as error:
        raise RuntimeError(f"it ended the program ({error})") from None
