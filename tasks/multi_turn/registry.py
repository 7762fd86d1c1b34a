"""Registries of schedulers and tools, which plugins extend, and the argument of schedulers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...templates.json_types import JsonObject
from ..system.plugins import Registrar

# Functions or classes, including ms-swift's classes (`multi_turns["name"] = Class`).
multi_turns: JsonObject = {}
registered_tools: dict[str, Callable] = {}


@dataclass
class Turn:
    """Answer of the model in an episode."""

    number: int  # 1 for the first answer
    messages: list[JsonObject]  # the conversation, with the answer at its end
    completion: str  # the answer
    raw: str  # the answer with special tokens, as generated
    token_ids: list[int]  # as generated
    finish: Literal["stop", "length"]  # length: truncated
    final: bool  # truncated, or the last turn by --max_turns: the scheduler's result is ignored
    columns: JsonObject  # of the row; None for columns that only other rows have
    state: JsonObject  # for the scheduler's own use, kept for the whole episode
    info: JsonObject  # the same, restricted to JSON types: rewards get it as `rollout_infos`
    request_id: str = ""  # of the episode


@dataclass
class EditedAnswer:
    """Result of a scheduler that has cut off generated tokens, or appended others, which are not trained on."""

    text: str  # of the message
    token_ids: list[int]  # generated tokens, then appended ones
    loss_mask: list[int]  # 0 or 1 for each
    messages: list[JsonObject]  # after the answer; empty: the model continues the message


scheduler = Registrar(multi_turns, "scheduler")


def tool[T: Callable](function: T) -> T:
    """Register a sync or async function as a tool of the model (--multi_turn_scheduler tools).

    Its name, type hints and docstring (in Google's format) describe it to the model. Raises ValueError for a duplicate
    name.
    """
    name = function.__name__
    if name in registered_tools:
        raise ValueError(f"@tool: there is already a tool {name}. Use another name")
    registered_tools[name] = function
    return function
