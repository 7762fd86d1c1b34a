"""Loading of the multi-turn scheduler and its tools from options: plugin import, name lookup, checks."""

from typing import Any

from ...templates.json_types import JsonObject
from ..options import GrpoOptions
from ..system.plugins import instantiate, load_plugins, unknown_name_error
from .call import Scheduler
from .ms_swift_compat import NOT_CALLED, MsSwiftAdapter, MultiTurnScheduler
from .registry import multi_turns, registered_tools
from .tools import Tools, schema_of

TOOLS = "tools"


def check_turns(options: GrpoOptions) -> None:
    """Import the plugins. Raises ValueError, naming the flag, for invalid options."""
    load_plugins(options.rewards.external_plugins)
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
                    f"--multi_turn_scheduler {name}: its {method}() would never be called, only step() and "
                    "check_finished(). Rewrite it as a @scheduler of megaswift.tasks.multi_turn"
                )


def load_scheduler(options: GrpoOptions) -> Scheduler:
    """Return the scheduler of options that `check_turns` has accepted."""
    name, timeout = options.multi_turn.multi_turn_scheduler, options.multi_turn.turn_timeout
    assert name is not None
    load_plugins(options.rewards.external_plugins)
    if name == TOOLS:
        return Scheduler(name, Tools(registered_tools, timeout), timeout, has_own_timeouts=True)
    return Scheduler(name, _instantiate(multi_turns[name], options), timeout)


def prompt_tools(options: object) -> list[JsonObject] | None:
    """Return the tool schemas for the chat template, for rows without their own. None if the run has no tools."""
    if not isinstance(options, GrpoOptions) or options.multi_turn.multi_turn_scheduler != TOOLS:
        return None
    load_plugins(options.rewards.external_plugins)
    return [schema_of(function) for function in registered_tools.values()]


def _instantiate(entry: Any, options: GrpoOptions) -> Any:
    if isinstance(entry, type) and issubclass(entry, MultiTurnScheduler):
        return MsSwiftAdapter(entry(max_turns=options.multi_turn.max_turns))
    return instantiate(entry, options)
