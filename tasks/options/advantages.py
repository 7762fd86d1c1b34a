"""Options of rewards' way to advantages, beside the estimator. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated


@dataclass
class AdvantageOptions:
    """Advantages"""

    whiten_advantages: Annotated[
        bool, "Give advantages a mean of 0 and a standard deviation of 1 over all trained tokens of a generation."
    ] = False
    advantage_clip: Annotated[float | None, "Clip advantages to this distance from 0, at last.", "(0, inf)"] = None
    normalize_rewards: Annotated[
        bool, "Subtract the mean of all rewards of the run so far, and divide by their standard deviation."
    ] = False
    reward_clip: Annotated[
        float | None, "Clip the sum of a completion's rewards to this distance from 0, after --normalize_rewards.",
        "(0, inf)",
    ] = None  # fmt: skip
    difficulty_range: Annotated[
        list[float],
        "Train only on prompts whose mean reward lies between these two numbers, such as 0.1 0.95. Default: all.",
        "(-inf, inf)",
    ] = field(default_factory=list)
    target_kl: Annotated[
        float | None,
        "kl_in_reward: adapt its coefficient, which begins with --beta, to keep the divergence per token near this. "
        "Default: it stays --beta.",
        "(0, inf)",
    ] = None
    kl_horizon: Annotated[
        int, "target_kl: completions after which the coefficient has moved by its relative distance from the target.",
        "[1, inf)",
    ] = 10_000  # fmt: skip
