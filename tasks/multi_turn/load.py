"""Loading of the multi-turn scheduler and its tools from options: plugin import, name lookup, checks."""

import inspect
from typing import Any

from ...templates.json_types import JsonObject
from ...templates.tokenizer import Tokenizer
from ..options import GkdOptions, GrpoOptions
from ..options.multi_turn import TurnOptions
from ..system.ms_swift_imports import ms_swift_imports
from ..system.plugins import instantiate, load_plugins, unknown_name_error
from .call import Scheduler
from .gym_env import envs
from .gym_scheduler import GYMScheduler
from .ms_swift_compat import NOT_CALLED, MsSwiftAdapter, MultiTurnScheduler
from .registry import multi_turns, registered_tools
from .tools import Tools, schema_of

TOOLS = "tools"


def check_turns(options: GrpoOptions | GkdOptions) -> None:
    """Raise ValueError, naming the flag, for invalid options. Plugins must have been loaded."""
    name = options.multi_turn.multi_turn_scheduler
    if name is None:
        return
    if name == TOOLS:
        if not registered_tools:
            raise ValueError(
                "--multi_turn_scheduler tools: no tool is registered. Register functions by @tool "
                "(`from megaswift.tasks.multi_turn import tool`) in a file of --external_plugins"
            )
        for function in registered_tools.values():
            schema_of(function)
        return
    if name not in multi_turns:
        raise unknown_name_error("--multi_turn_scheduler", name, [TOOLS, *multi_turns], "scheduler")
    entry = multi_turns[name]
    if isinstance(entry, type) and issubclass(entry, MultiTurnScheduler):
        for method in NOT_CALLED:
            if hasattr(entry, method):
                raise ValueError(
                    f"--multi_turn_scheduler {name}: its {method}() would never be called, only step(), "
                    "check_finished(), on_turn_end() and on_trajectory_start(). Rewrite it as a @scheduler of "
                    "megaswift.tasks.multi_turn"
                )
    _check_environment(options.multi_turn, entry)


def _check_environment(options: TurnOptions, entry: Any) -> None:
    name = options.gym_env
    if name is None:
        return
    if not (isinstance(entry, type) and issubclass(entry, GYMScheduler)):
        raise ValueError(
            f"--gym_env {name}: --multi_turn_scheduler {options.multi_turn_scheduler} has no environments. Set "
            "gym_scheduler"
        )
    if name not in envs:
        raise unknown_name_error("--gym_env", name, envs, "environment")


def load_scheduler(options: GrpoOptions | GkdOptions, tokenizer: Tokenizer) -> Scheduler:
    """Return the scheduler of options that `check_turns` has accepted."""
    name, timeout = options.multi_turn.multi_turn_scheduler, options.multi_turn.turn_timeout
    assert name is not None
    load_plugins(options.plugins.external_plugins)
    if name == TOOLS:
        return Scheduler(name, Tools(registered_tools, timeout), timeout, has_own_timeouts=True)
    return Scheduler(name, _instantiate(multi_turns[name], options, tokenizer), timeout)


def prompt_tools(options: object) -> list[JsonObject] | None:
    """Return the tool schemas for the chat template, for rows without their own. None if the run has no tools."""
    if not isinstance(options, GrpoOptions | GkdOptions) or options.multi_turn.multi_turn_scheduler != TOOLS:
        return None
    load_plugins(options.plugins.external_plugins)
    return [schema_of(function) for function in registered_tools.values()]


def _instantiate(entry: Any, options: GrpoOptions | GkdOptions, tokenizer: Tokenizer) -> Any:
    if isinstance(entry, type) and issubclass(entry, MultiTurnScheduler):
        turns = options.multi_turn
        settings = {"max_turns": turns.max_turns, "tokenizer": tokenizer}
        settings |= {"gym_env": turns.gym_env} if turns.gym_env else {}
        parameters = inspect.signature(entry).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            settings = {name: value for name, value in settings.items() if name in parameters}
        with ms_swift_imports():
            return MsSwiftAdapter(entry(**settings))
    return instantiate(entry, options)
