"""OLMo 3: OLMo 2 with windows in three of four layers, and rope scaling in the others only."""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family
from . import olmo2
from .decoder import read_ropes, sliding_layers

ROPE_BASE = 5e5


def architecture(config: HfConfig) -> Architecture:
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    if config.get("rope_theta") not in (None, ROPE_BASE):
        raise ValueError(
            f"config.json has rope_theta {config['rope_theta']}, which transformers' Olmo3 gives to layers with full "
            "attention only: put a rope_theta for full_attention and for sliding_attention into rope_parameters"
        )
    layers = sliding_layers(config, [(layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])])
    return olmo2.architecture(
        config,
        ropes=read_ropes(config, head_dim, full_base=ROPE_BASE, sliding_base=ROPE_BASE),
        layers=tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in layers),
    )


FAMILY = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    models="OLMo 3",
    architecture=architecture,
    mappings=olmo2.mappings,
    limits=("rope_theta that transformers' class gives to some layers only",),
    defaults=olmo2.OLMO_DEFAULTS,
)
