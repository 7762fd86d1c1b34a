"""Loading of rewards from options: plugin import, name lookup, checks."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ..options.rewards import RewardOptions
from ..system.plugins import instantiate, is_plugins, unknown_name_error
from . import by_source, functions, single_rule
from .math_verify_threads import allow_time_limits_in_threads
from .registry import orms
from .reward_fn import Reward
from .score_function import register_score_functions

MODEL, GYM = "reward_model", "gym_reward"
BUILT_IN_MODULES = functions.__name__, by_source.__name__, single_rule.__name__


def reward_names(options: RewardOptions) -> list[str]:
    """Return the rewards of a run, in the order of their weights."""
    has_extra_model = options.reward_model is not None and MODEL not in options.reward_funcs
    has_extra_gym = options.use_gym_env and GYM not in options.reward_funcs
    return [*options.reward_funcs, *([MODEL] if has_extra_model else []), *([GYM] if has_extra_gym else [])]


def reward_weights(options: RewardOptions) -> list[float]:
    """Return the weight of each of `reward_names`."""
    return options.reward_weights or [1.0] * len(reward_names(options))


def check_rewards(options: RewardOptions) -> None:
    """Raise ValueError, naming the flag, for invalid options. Plugins must have been loaded."""
    names, weights = reward_names(options), options.reward_weights
    if not names:
        raise ValueError("--reward_funcs: completions need a reward. Set some, a --reward_model, or a --gym_env")
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--reward_funcs {' '.join(names)}: {duplicates[0]} occurs twice. Set its weight instead")
    register_score_functions(names)
    for name in names:
        _check_known(name, options)
    if weights and len(weights) != len(names):
        raise ValueError(
            f"--reward_weights {' '.join(map(str, weights))}: set {len(names)}, one for each of {', '.join(names)}"
        )
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"--reward_weights {' '.join(map(str, weights))}: set finite numbers")
    if not options.reward_timeout > 0:
        raise ValueError(f"--reward_timeout {options.reward_timeout}: set seconds above 0")
    for name in names:
        if getattr(orms.get(name), "__module__", None) in BUILT_IN_MODULES:
            instantiate(orms[name], options)  # checks its flags; a user's class may be expensive to make


def load_rewards(options: RewardOptions, run_options: object, model: Callable | None = None) -> list[Reward]:
    """Return the rewards of options that `check_rewards` has accepted. Plugins must have been loaded.

    run_options: all options of the run, passed to a reward class as `args`
    model: the `ModelReward` of `--reward_model`, if set
    """
    names = reward_names(options)
    register_score_functions(names)
    if any(is_plugins(orms.get(name)) for name in names):
        allow_time_limits_in_threads()
    return [Reward(name, model if name == MODEL and model else instantiate(orms[name], run_options)) for name in names]


def signatures(options: RewardOptions) -> list[Reward]:
    """Return the rewards for inspection only: classes are not instantiated, which may be expensive."""
    rewards = []
    register_score_functions(reward_names(options))
    for name in reward_names(options):
        entry: Any = orms.get(name) or (lambda messages: messages)  # a reward model
        function: Any = partial(entry.__call__, None) if isinstance(entry, type) else entry
        if alternatives := getattr(entry, "required_alternatives", ()):
            function.required_alternatives = alternatives
        rewards.append(Reward(name, function))
    return rewards


def _check_known(name: str, options: RewardOptions) -> None:
    if name in orms or (name == MODEL and options.reward_model is not None):
        return
    if name == MODEL:
        raise ValueError("--reward_funcs reward_model: set --reward_model")
    raise unknown_name_error("--reward_funcs", name, [*orms, MODEL], "reward")
