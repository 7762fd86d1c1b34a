"""Options of multi-turn episodes. No torch: the command line imports this."""

from dataclasses import dataclass
from typing import Annotated


@dataclass
class TurnOptions:
    """Turns"""

    multi_turn_scheduler: Annotated[
        str | None, "Scheduler of multi-turn episodes: tools, gym_scheduler, or a plugin's. Default: single-turn."
    ] = None
    gym_env: Annotated[
        str | None, "gym_scheduler: environment of rows whose column env_config names none; a plugin's."
    ] = None
    max_turns: Annotated[
        int | None, "Maximum turns of an episode. Default: as many as fit into --max_completion_length.", "(0, inf)"
    ] = None
    turn_images: Annotated[
        int | None,
        "Most images that tools and schedulers send in an episode. Needed where the data has no images; by default "
        "there is no limit where it has some.",
        "(0, 1e6]",
    ] = None
    turn_timeout: Annotated[
        float,
        "Timeout of a scheduler in seconds; then the run fails (tools: the model gets an error message).",
        "(0, 1e9]",
    ] = 60.0
