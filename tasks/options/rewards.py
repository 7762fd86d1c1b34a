"""Options of rewards. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated


@dataclass
class RewardOptions:
    """Rewards"""

    reward_funcs: Annotated[
        list[str],
        "Reward functions: accuracy, format, cosine, repetition, soft_overlong, reward_model, or a plugin's.",
    ] = field(default_factory=list)
    reward_weights: Annotated[
        list[float],
        "Weight of each reward; --reward_model is the last if --reward_funcs does not list it. Default: 1.",
        "(-inf, inf)",
    ] = field(default_factory=list)
    use_gym_env: Annotated[
        bool | None,
        "Add the total reward of an episode's environment, as the last reward. Default: true with --gym_env.",
    ] = None
    reward_model: Annotated[str | None, "A reward model: a folder, or a hub id."] = None
    reward_timeout: Annotated[float, "Timeout of a reward in seconds; then the run fails.", "(0, 1e9]"] = 60.0
    cosine_min_len_value_wrong: Annotated[
        float, "cosine: reward of a wrong completion of length 0.", "(-inf, inf)"
    ] = -0.5
    cosine_max_len_value_wrong: Annotated[
        float, "cosine: reward of a wrong completion of --cosine_max_len.", "(-inf, inf)"
    ] = 0.0
    cosine_min_len_value_correct: Annotated[
        float, "cosine: reward of a correct completion of length 0.", "(-inf, inf)"
    ] = 1.0
    cosine_max_len_value_correct: Annotated[
        float, "cosine: reward of a correct completion of --cosine_max_len.", "(-inf, inf)"
    ] = 0.5
    cosine_max_len: Annotated[
        int | None, "cosine: maximum length in tokens. Default: --max_completion_length.", "[1, inf)"
    ] = None
    repetition_n_grams: Annotated[int, "repetition: size of the n-grams.", "[1, inf)"] = 3
    repetition_max_penalty: Annotated[
        float, "repetition: reward of a fully repetitive completion.", "(-inf, inf)"
    ] = -1.0
    soft_max_length: Annotated[
        int | None, "soft_overlong: length at which the reward is -1. Default: --max_completion_length.", "[1, inf)"
    ] = None
    soft_cache_length: Annotated[
        int | None,
        "soft_overlong: length before --soft_max_length over which the reward falls from 0 to -1.",
        "[0, inf)",
    ] = None
