"""Schedulers and tools by name, which plugins put in; and what a scheduler is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..system.plugins import Registrar

# A function, or a class; of ms-swift's kind too (`multi_turns["name"] = Class`).
multi_turns: dict[str, Any] = {}
registered_tools: dict[str, Callable] = {}


@dataclass
class Turn:
    """An answer of the model, in an episode."""

    number: int  # 1 for the first answer
    messages: list[dict[str, Any]]  # the conversation, with the answer at its end
    completion: str  # the answer
    raw: str  # what the model has drawn of it, with special tokens
    token_ids: list[int]  # as they were drawn
    finish: Literal["stop", "length"]  # length: it was cut off
    final: bool  # cut off, or the last that --max_turns allows: what is returned is not used
    columns: dict[str, Any]  # of the row; None where it lacks one that others have
    state: dict[str, Any]  # the scheduler's own, anything; for as long as the episode lasts
    info: dict[str, Any]  # likewise, numbers, texts and lists: rewards get it as `rollout_infos`


scheduler = Registrar(multi_turns, "scheduler")


def tool[T: Callable](function: T) -> T:
    """Register a function, sync or async, that the model may call by its name: --multi_turn_scheduler tools.

    Its type hints and its docstring, in Google's form, are what the model is told of it. Raises ValueError where the
    name is taken.
    """
    name = function.__name__
    if name in registered_tools:
        raise ValueError(f"@tool: there is a tool {name}. Choose another name")
    registered_tools[name] = function
    return function
