"""Options of `megatron tune`. No torch: the command line imports this."""

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass
class TuneOptions:
    """megatron tune"""

    command: Annotated[Literal["sft", "pt"], "Command of the run, whose flags follow."] = "sft"
    trials: Annotated[int, "Layouts to try: the first ones of the plan.", "(0, inf)"] = 4
    trial_steps: Annotated[int, "Steps of a trial, of which the first is not measured.", "(1, inf)"] = 5
    trial_timeout: Annotated[float, "Seconds after which a trial is ended.", "(0, inf)"] = 1800.0
    trial_dir: Annotated[
        str | None, "New folder for the config file, the measurements and the logs. Default: tune-TIME beside the run."
    ] = None
