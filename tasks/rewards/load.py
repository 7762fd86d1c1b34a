"""From options to rewards: plugins are imported, names looked up, what cannot be is refused."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ..options.rewards import RewardOptions
from ..system.plugins import load_plugins, made, unknown
from . import functions
from .registry import orms
from .reward_fn import Reward

MODEL = "reward_model"


def reward_names(options: RewardOptions) -> list[str]:
    """The rewards of a run, in the order of their weights."""
    also_model = options.reward_model is not None and MODEL not in options.reward_funcs
    return [*options.reward_funcs, *([MODEL] if also_model else [])]


def reward_weights(options: RewardOptions) -> list[float]:
    """The weight of each of `reward_names`."""
    return options.reward_weights or [1.0] * len(reward_names(options))


def check_rewards(options: RewardOptions) -> None:
    """Import the plugins, and raise ValueError, which names the flag, for what cannot be."""
    load_plugins(options.external_plugins)
    names, weights = reward_names(options), options.reward_weights
    if not names:
        raise ValueError("--reward_funcs: completions need a reward. Name some, or give a --reward_model")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--reward_funcs {' '.join(names)}: {twice[0]} is there twice. Give it a weight instead")
    for name in names:
        _check_known(name, options)
    if weights and len(weights) != len(names):
        raise ValueError(
            f"--reward_weights {' '.join(map(str, weights))}: give {len(names)}, one for each of {', '.join(names)}"
        )
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"--reward_weights {' '.join(map(str, weights))}: give finite numbers")
    if not options.reward_timeout > 0:
        raise ValueError(f"--reward_timeout {options.reward_timeout}: give seconds, above 0")
    for name in names:
        if getattr(orms.get(name), "__module__", None) == functions.__name__:
            made(orms[name], options)  # which looks at its own flags; a user's may be dear to make


def load_rewards(options: RewardOptions, model: Callable | None = None) -> list[Reward]:
    """The rewards of `options`, which `check_rewards` has found in order, ready to be called.

    `model`: the `ModelReward` of `--reward_model`, where that is given.
    """
    load_plugins(options.external_plugins)
    return [
        Reward(name, model if name == MODEL and model else made(orms[name], options)) for name in reward_names(options)
    ]


def signatures(options: RewardOptions) -> list[Reward]:
    """The rewards of `options` to look at what they want, and not to be called: no class is made, which may be dear."""
    found = []
    for name in reward_names(options):
        entry: Any = orms.get(name) or (lambda messages: messages)  # of a reward model
        found.append(Reward(name, partial(entry.__call__, None) if isinstance(entry, type) else entry))
    return found


def _check_known(name: str, options: RewardOptions) -> None:
    if name in orms or (name == MODEL and options.reward_model is not None):
        return
    if name == MODEL:
        raise ValueError("--reward_funcs reward_model: say which by --reward_model")
    raise unknown("--reward_funcs", name, [*orms, MODEL], "reward")
