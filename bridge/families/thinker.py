"""Thinkers of Omni models: the language model and its towers, whose settings and tensors have a prefix of their own.

config.json of such a model has them in `thinker_config`, beside the settings of models that speak. A raw config.json
is lifted when it is read: it has the thinker's settings outside, and all as it was in `whole_config`.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..mapping.architecture import HfConfig
from ..mapping.param_mapping import ParamMapping

THINKER, WHOLE = "thinker_config", "whole_config"
THINKER_PREFIX = "thinker."  # tensors' names begin with it
NAMES = "model_type", "architectures"  # settings of the whole model alone
OF_BOTH = "dtype", "torch_dtype"
SPEECH = r"talker\.|code2wav\.|token2wav\."  # tensors of the models that speak


def lift_thinker(config: HfConfig) -> HfConfig:
    """Return a config.json with the thinker's settings outside; as it is without a thinker."""
    thinker = config.get(THINKER) if isinstance(config, dict) else None
    if not isinstance(thinker, dict) or WHOLE in config:
        return config
    settings = {name: value for name, value in thinker.items() if name not in NAMES}
    return config | {"tie_word_embeddings": False} | settings | {WHOLE: config}


def lower_thinker(config: HfConfig) -> HfConfig:
    """Return the config.json that `lift_thinker` has lifted, with what has been changed since."""
    if WHOLE not in config:
        return config
    omni_config = dict(config[WHOLE])
    thinker, lifted = dict(omni_config[THINKER]), lift_thinker(config[WHOLE])
    for name in (lifted.keys() | config.keys()) - {WHOLE, THINKER}:
        if name in lifted and name in config and lifted[name] == config[name]:
            continue
        is_inside = name in thinker and name not in NAMES
        for part in [thinker] * is_inside + [omni_config] * (
            not is_inside or (name in OF_BOTH and name in omni_config)
        ):
            if name in config:
                part[name] = config[name]
            else:
                part.pop(name, None)
    return omni_config | {THINKER: thinker}


def add_thinker_prefix(name: str) -> str:
    return THINKER_PREFIX + name


def under_thinker(mappings: Sequence[ParamMapping]) -> list[ParamMapping]:
    """Return the mappings of an Omni model's tower, and behind them those of a thinker by itself."""
    return [*(replace(mapping, hf=THINKER_PREFIX + mapping.hf) for mapping in mappings), *mappings]
