"""Command R7B and Command A: Command R with windows in three of four layers, and a rope in these only."""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family
from . import cohere
from .decoder import sliding_layers


def architecture(config: HfConfig) -> Architecture:
    pattern = config.get("sliding_window_pattern", 4)
    layers = sliding_layers(config, [(layer + 1) % pattern != 0 for layer in range(config["num_hidden_layers"])])
    return cohere.architecture(
        config, layers=tuple(replace(layer, rope=0 if layer.window else None) for layer in layers)
    )


FAMILY = Family(
    name="cohere2",
    architectures=("Cohere2ForCausalLM",),
    models="Command R7B, Command A",
    architecture=architecture,
    mappings=cohere.mappings,
    defaults=cohere.COHERE_DEFAULTS,
)
