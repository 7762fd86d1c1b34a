"""Options of rewards. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated


@dataclass
class RewardOptions:
    """Rewards"""

    reward_funcs: Annotated[
        list[str],
        "What scores completions: accuracy, format, cosine, repetition, soft_overlong, reward_model, or a plugin's.",
    ] = field(default_factory=list)
    reward_weights: Annotated[
        list[float],
        "The weight of each of them, with --reward_model as the last where it is not among them; left out: 1.",
        "(-inf, inf)",
    ] = field(default_factory=list)
    external_plugins: Annotated[list[str], "Python files in which rewards, schedulers and tools are registered."] = (
        field(default_factory=list)
    )
    reward_model: Annotated[str | None, "A reward model: a folder, or a hub id."] = None
    reward_timeout: Annotated[float, "Seconds until a reward that has not answered ends the run.", "(0, 1e9]"] = 60.0
    cosine_min_len_value_wrong: Annotated[float, "cosine: a wrong completion that has no length.", "(-inf, inf)"] = -0.5
    cosine_max_len_value_wrong: Annotated[float, "cosine: a wrong one of --cosine_max_len.", "(-inf, inf)"] = 0.0
    cosine_min_len_value_correct: Annotated[float, "cosine: a right one that has no length.", "(-inf, inf)"] = 1.0
    cosine_max_len_value_correct: Annotated[float, "cosine: a right one of --cosine_max_len.", "(-inf, inf)"] = 0.5
    cosine_max_len: Annotated[
        int | None, "cosine: tokens from which on length counts no more; left out: --max_completion_length.", "[1, inf)"
    ] = None
    repetition_n_grams: Annotated[int, "repetition: tokens that repeat as one.", "[1, inf)"] = 3
    repetition_max_penalty: Annotated[float, "repetition: the reward where all repeats.", "(-inf, inf)"] = -1.0
    soft_max_length: Annotated[
        int | None, "soft_overlong: tokens at which it is -1; left out: --max_completion_length.", "[1, inf)"
    ] = None
    soft_cache_length: Annotated[
        int | None, "soft_overlong: tokens before these from which on it falls from 0.", "[0, inf)"
    ] = None
