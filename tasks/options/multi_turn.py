"""Options of multi-turn episodes. No torch: the command line imports this."""

from dataclasses import dataclass
from typing import Annotated


@dataclass
class TurnOptions:
    """Turns"""

    multi_turn_scheduler: Annotated[
        str | None, "What answers the model, which then goes on: tools, or a plugin's; left out: one answer a prompt."
    ] = None
    max_turns: Annotated[
        int | None, "Answers of an episode, at most; left out: as many as fit into --max_completion_length.", "(0, inf)"
    ] = None
    turn_timeout: Annotated[
        float,
        "Seconds until a scheduler that has not answered ends the run; tools: until the model is told so.",
        "(0, 1e9]",
    ] = 60.0
