"""EXAONE 4: norms on the outputs of attention and MLP only; with windows, only the layers that have one have a rope."""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Layer
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import DEFAULTS, ENDS, POST_NORMS, PROJECTIONS, QK_NORMS, describe_decoder, mlp, sliding_layers


def architecture(config: HfConfig) -> Architecture:
    attention = {"qk_layernorm": True}
    return describe_decoder(config, attention, layers=window_layers(config), pre_norms=False, post_norms=True)


def window_layers(config: HfConfig) -> tuple[Layer, ...]:
    """Describe EXAONE's layers: those with a window have a rope; without windows all have one."""
    window, pattern = config.get("sliding_window", 4096), config.get("sliding_window_pattern", 4)
    numbers = range(config["num_hidden_layers"])
    if window is None:
        return sliding_layers(config, [False for _ in numbers])
    if config.get("layer_types") is None and (not isinstance(pattern, int) or pattern < 1):
        raise ValueError(
            f"config.json has sliding_window_pattern {pattern!r} and no layer_types, which transformers' Exaone4 needs "
            "then: set layer_types, one for each layer"
        )
    is_sliding = [isinstance(pattern, int) and (number + 1) % pattern != 0 for number in numbers]
    return tuple(replace(layer, rope=0 if layer.window else None) for layer in sliding_layers(config, is_sliding))


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + POST_NORMS + PROJECTIONS + QK_NORMS + mlp()


FAMILY = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM",),
    models="EXAONE 4.0 1.2B and 32B",
    architecture=architecture,
    mappings=mappings,
    limits=("sliding_window_pattern as letters without layer_types (transformers' class fails)",),
    defaults=DEFAULTS
    | {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
)
