"""Options of rewards. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated


@dataclass
class RewardOptions:
    """Rewards"""

    reward_funcs: Annotated[
        list[str],
        "Reward functions: accuracy, gsm8k, countdown, by_source, format, cosine, repetition, soft_overlong, "
        "reward_model, or those of plugins.",
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
    source_rules: Annotated[
        dict[str, str],
        'by_source: rules of further sources (also patterns), as JSON: \'{"source": "math"}\'. Rules: gsm8k, math, '
        "crossthinkqa, countdown, ifeval, code, code_share, judge, none.",
    ] = field(default_factory=dict)
    judge_server: Annotated[
        str | None, "by_source: URL of an OpenAI-compatible server, which the rule judge asks (key: JUDGE_API_KEY)."
    ] = None
    judge_model: Annotated[str | None, "judge: name of the model. Default: the only one of the server."] = None
    judge_prompt: Annotated[
        str | None,
        "judge: prompt with {question}, {reference} and {response}, or a .txt file with it. The reply's last YES or NO "
        "counts, or `Score: N` of 10.",
    ] = None
    countdown_format_score: Annotated[
        float, "countdown, also as a rule: score of an equation that is wrong.", "(-inf, inf)"
    ] = 0.1
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
