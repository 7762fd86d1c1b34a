"""Mistral: Llama's layers, all with sliding-window attention if config.json has a window."""

from ..mapping.param_mapping import Architecture, Family, HfConfig, Layer, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, describe_decoder, mlp


def architecture(config: HfConfig) -> Architecture:
    if len(set(config.get("layer_types") or [])) > 1:
        raise ValueError(
            "config.json has layer_types that differ, which transformers' Mistral ignores: its layers all have the "
            "window of sliding_window. Remove layer_types"
        )
    window = config.get("sliding_window", 4096)  # null: none
    return describe_decoder(config, layers=(Layer(window=window),) * config["num_hidden_layers"])


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + mlp()


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    models="Mistral 7B, Nemo, Small (up to 3.0), Large",
    architecture=architecture,
    mappings=mappings,
    limits=("layer_types that differ (transformers' class ignores them)",),
    defaults=DEFAULTS
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)
