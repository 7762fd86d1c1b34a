"""The families of models: one file each, and the registry that finds the one of a config.json."""

from typing import Any

from ..mapping.param_mapping import Family
from . import (
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    gemma3_text,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    llama4_text,
    minimax_m2,
    mistral,
    mixtral,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
)
from .sequence_classification import head_of, scored
from .vlm_text import text_config

FAMILIES: tuple[Family, ...] = (
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    llama.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    glm4_moe.FAMILY,
    dots1.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5_text.FAMILY,
    qwen3_5_moe_text.FAMILY,
    mixtral.FAMILY,
    olmoe.FAMILY,
    ernie4_5_moe.FAMILY,
    minimax_m2.FAMILY,
    gpt_oss.FAMILY,
    mistral.FAMILY,
    phi3.FAMILY,
    granite.FAMILY,
    glm4.FAMILY,
    ernie4_5.FAMILY,
    gemma3_text.FAMILY,
    llama4_text.FAMILY,
)


def family_of(hf_config: dict[str, Any]) -> Family:
    """The family of a raw config.json, by its `architectures`, or by its `model_type` where it names none.

    Where these have a head in the place of the output layer: the family's models that do, by `model_type`. Raises
    ValueError, with the list of what is known, for an architecture that is not.
    """
    named = hf_config.get("architectures") or []
    if head_of(hf_config) is not None:
        for family in FAMILIES:
            if text_config(hf_config).get("model_type") == family.name:
                return scored(family)
    for family in FAMILIES:
        if set(named) & set(family.architectures) or (not named and hf_config.get("model_type") == family.name):
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    what = f"architecture {', '.join(named)}" if named else f"model_type {hf_config.get('model_type')!r}"
    raise ValueError(f"config.json names the {what}, which this version does not know. It knows: {known}")
