"""From options to a scheduler and its tools: plugins are imported, names looked up, what cannot be is refused."""

from typing import Any

from ..options.multi_turn import TurnOptions
from ..system.plugins import load_plugins, made, unknown
from .call import Scheduler
from .ms_swift_compat import NOT_CALLED, Adapter, MultiTurnScheduler
from .registry import multi_turns, registered_tools
from .tools import Tools, schema_of

TOOLS = "tools"


def check_turns(options: Any) -> None:
    """Import the plugins, and raise ValueError, which names the flag, for what cannot be.

    `options`: TurnOptions, with the plugins of RewardOptions.
    """
    load_plugins(options.external_plugins)
    name = options.multi_turn_scheduler
    if name is None:
        return
    if name == TOOLS:
        if not registered_tools:
            raise ValueError(
                "--multi_turn_scheduler tools: there is no tool. Register functions by @tool "
                "(`from megaswift.tasks.multi_turn import tool`) in a file of --external_plugins"
            )
        for function in registered_tools.values():
            schema_of(function)
        return
    if name not in multi_turns:
        raise unknown("--multi_turn_scheduler", name, [TOOLS, *multi_turns], "scheduler")
    entry = multi_turns[name]
    if isinstance(entry, type) and issubclass(entry, MultiTurnScheduler):
        for method in NOT_CALLED:
            if hasattr(entry, method):
                raise ValueError(
                    f"--multi_turn_scheduler {name}: its {method}() would not be called, here only step() and "
                    "check_finished() are. Write it as a @scheduler of megaswift.tasks.multi_turn"
                )


def load_scheduler(options: TurnOptions) -> Scheduler:
    """The scheduler of `options`, which `check_turns` has found in order."""
    name, timeout = options.multi_turn_scheduler, options.turn_timeout
    assert name is not None
    load_plugins(options.external_plugins)  # type: ignore[attr-defined]
    if name == TOOLS:
        return Scheduler(name, Tools(registered_tools, timeout), timeout, bounds_itself=True)
    return Scheduler(name, _made(multi_turns[name], options), timeout)


def prompt_tools(options: Any) -> list[dict[str, Any]] | None:
    """The schemas of the tools of rows that name none, for the chat template; none where there are no tools."""
    if not isinstance(options, TurnOptions) or options.multi_turn_scheduler != TOOLS:
        return None
    load_plugins(options.external_plugins)  # type: ignore[attr-defined]
    return [schema_of(function) for function in registered_tools.values()]


def _made(entry: Any, options: TurnOptions) -> Any:
    if isinstance(entry, type) and issubclass(entry, MultiTurnScheduler):
        return Adapter(entry(max_turns=options.max_turns))
    return made(entry, options)
