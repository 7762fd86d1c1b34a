"""Former location of tasks/multi_turn, kept for plugins: `from megaswift.tasks.turns import scheduler`."""

from .multi_turn import MultiTurnScheduler, Turn, multi_turns, scheduler, tool

__all__ = ["MultiTurnScheduler", "Turn", "multi_turns", "scheduler", "tool"]
