"""Multi-turn episodes: the model answers, a scheduler returns the next messages, and the model answers again.

Users add schedulers in files of `--external_plugins`, and select one by `--multi_turn_scheduler`:

    from megaswift.tasks.multi_turn import scheduler

    @scheduler("again")
    def again(turn):  # None ends the episode; else a user's text, a message, or a list of messages
        return None if turn.columns["solution"] in turn.completion else "That is wrong. Try again."

A scheduler is called after each answer of the model, and may be async. `turn` is a `Turn`. A class is instantiated
once, with the run's options where it takes `args`. The scheduler `tools` calls functions registered by `@tool`.
"""

from .ms_swift_compat import MultiTurnScheduler
from .registry import Turn, multi_turns, scheduler, tool

__all__ = ["MultiTurnScheduler", "Turn", "multi_turns", "scheduler", "tool"]
