"""Episodes of several turns: the model answers, a scheduler says what it is told next, and the model goes on.

A user's own are in files that `--external_plugins` names, and are chosen by `--multi_turn_scheduler`:

    from megaswift.tasks.multi_turn import scheduler

    @scheduler("again")
    def again(turn):  # None: the episode is over; else a text of the user, a message, or a list of messages
        return None if turn.columns["solution"] in turn.completion else "That is wrong. Try again."

Called after each of the model's answers; may be async. `turn` is a `Turn`. A class is made once, with the run's options
where it takes `args`. The scheduler `tools` calls functions that are registered by `@tool`.
"""

from .ms_swift_compat import MultiTurnScheduler
from .registry import Turn, multi_turns, scheduler, tool

__all__ = ["MultiTurnScheduler", "Turn", "multi_turns", "scheduler", "tool"]
