"""Mistral: Llama's layers, all with sliding-window attention if config.json has a window.

Mistral Small 3.1 and 3.2 are Mistral3ForConditionalGeneration: only the text model is trained.
"""

from typing import Any

from ..mapping.param_mapping import Architecture, Family, HfConfig, Layer, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, describe_decoder, mlp
from .vlm_text import (
    NESTED_MODULES,
    TOWER_AND_PROJECTOR,
    add_language_model_prefix,
    nest_in_language_model,
    text_config,
)

ARCHITECTURES = ("Mistral3ForConditionalGeneration",)
VLM_NAMES = (nest_in_language_model, add_language_model_prefix)
LIMITS = (
    "layer_types that differ (transformers' class ignores them)",
    "images: the vision tower passes through unchanged",
)


def architecture(config: HfConfig) -> Architecture:
    return describe_mistral(config, config.get("sliding_window", 4096))


def describe_mistral(config: HfConfig, window: int | None, **fields: Any) -> Architecture:
    """Return the architecture, alone or in a vision-language model. window: None for full attention."""
    if len(set(config.get("layer_types") or [])) > 1:
        raise ValueError(
            "config.json has layer_types that differ, which transformers' Mistral ignores: its layers all have the "
            "window of sliding_window. Remove layer_types"
        )
    layers = (Layer(window=window),) * config["num_hidden_layers"]
    return describe_decoder(
        config, layers=layers, passthrough=TOWER_AND_PROJECTOR, module_names=NESTED_MODULES, **fields
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + mlp()


def mistral3_text_config(config: HfConfig) -> HfConfig:
    """Return the text model's part of a config.json.

    transformers ties the output layer by the outer tie_word_embeddings, but not if the files have two matrices. Files
    whose config.json has none outside follow the inner one.
    """
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return text_config(config, use_inner_tie=True) | outer


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM", *ARCHITECTURES),
    models="Mistral 7B, Nemo, Small (3.1 and 3.2: text), Large",
    architecture=architecture,
    mappings=mappings,
    text_config=mistral3_text_config,
    vlm_names=VLM_NAMES,
    limits=LIMITS,
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
