"""Mistral: Llama's layers, all with sliding-window attention if config.json has a window.

Mistral Small 3.1 and 3.2 are Mistral3ForConditionalGeneration, beside the tower of pixtral.py.
"""

from functools import partial
from typing import Any

from ..mapping.architecture import Architecture, HfConfig, Layer
from ..mapping.param_mapping import Family, ParamMapping
from . import pixtral
from .decoder import ATTENTION, DEFAULTS, ENDS, describe_decoder, mlp
from .vlm_text import (
    NESTED_MODULES,
    TOWER_AND_PROJECTOR,
    add_language_model_prefix,
    nest_in_language_model,
    nested_text_config,
)

ARCHITECTURES = ("Mistral3ForConditionalGeneration",)
VLM_NAMES = (nest_in_language_model, add_language_model_prefix)
LIMITS = (
    "layer_types that differ (transformers' class ignores them)",
    "a tower of which layers other than the last are used (vision_feature_layer); videos",
)
TEXT_DEFAULTS = DEFAULTS | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


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


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM", *ARCHITECTURES),
    models="Mistral 7B, Nemo, Small (3.1 and 3.2 with the tower), Large",
    architecture=architecture,
    mappings=mappings,
    text_config=nested_text_config,
    vision=partial(pixtral.vision, text_defaults=TEXT_DEFAULTS),
    vision_mappings=pixtral.vision_mappings,
    vlm_names=VLM_NAMES,
    limits=LIMITS,
    defaults=TEXT_DEFAULTS,
)
