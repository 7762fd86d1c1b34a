"""config.json as families read it: the settings of one language model and its towers are outside, or in text_config."""

from ..mapping.architecture import HfConfig
from .internvl import lift_language_model, lower_language_model
from .thinker import lift_thinker, lower_thinker


def lift_config(config: HfConfig) -> HfConfig:
    """Return a config.json as families read it; most are so already."""
    return lift_language_model(lift_thinker(config))


def lower_config(config: HfConfig) -> HfConfig:
    """Return the config.json that `lift_config` has lifted, with what has been changed since."""
    return lower_language_model(lower_thinker(config))
