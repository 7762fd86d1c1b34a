"""Model families, one file each, and the registry that selects one by config.json."""

from ..mapping.architecture import HfConfig
from ..mapping.param_mapping import Family
from . import (
    apertus,
    arcee,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    falcon_h1,
    gemma,
    gemma2,
    gemma3_text,
    gemma4_text,
    gemma4_unified_text,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm4v_moe_text,
    glm4v_text,
    glm_moe_dsa,
    gpt_oss,
    granite,
    granitemoe,
    granitemoehybrid,
    granitemoeshared,
    hunyuan_v1_dense,
    hunyuan_v1_moe,
    hy_v3,
    kimi_linear,
    lfm2,
    lfm2_moe,
    llama,
    llama4_text,
    llava_onevision,
    minimax,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    nemotron,
    nemotron_h,
    olmo2,
    olmo3,
    olmoe,
    ovis2,
    phi3,
    phimoe,
    qwen2,
    qwen2_5_omni_text,
    qwen2_5_vl_text,
    qwen2_moe,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_asr,
    qwen3_moe,
    qwen3_next,
    qwen3_omni_moe_text,
    qwen3_vl_moe_text,
    qwen3_vl_text,
    seed_oss,
    smollm3,
    starcoder2,
)
from .sequence_classification import count_labels, make_classifier
from .vlm_text import text_config

FAMILIES: tuple[Family, ...] = tuple(
    module.FAMILY
    for module in (
        qwen2, qwen3, qwen3_moe, llama, deepseek_v2, deepseek_v3, glm4_moe, dots1, qwen2_moe, qwen3_next, qwen3_5_text,
        qwen3_5_moe_text, mixtral, olmoe, ernie4_5_moe, minimax_m2, gpt_oss, mistral, phi3, granite, glm4, ernie4_5,
        gemma3_text, llama4_text, qwen2_5_vl_text, qwen3_vl_text, qwen3_vl_moe_text, seed_oss,
        smollm3, olmo2, olmo3, arcee, exaone4, glm4_moe_lite,
        ministral3, hunyuan_v1_dense, hunyuan_v1_moe, cohere, cohere2,
        gemma, gemma2, apertus, granitemoe, granitemoeshared, nemotron, starcoder2, glm,
        glm4v_text, glm4v_moe_text, qwen3_asr, hy_v3, exaone_moe, gemma4_text, gemma4_unified_text,
        deepseek_v32, glm_moe_dsa, nemotron_h, mistral4, llava_onevision, qwen3_omni_moe_text,
        qwen2_5_omni_text, phimoe, ovis2, minimax, granitemoehybrid, falcon_h1, lfm2, lfm2_moe, kimi_linear,
    )
)  # fmt: skip


def family_of(hf_config: HfConfig) -> Family:
    """Return the family of a raw config.json, by its `architectures`, or by its `model_type` if it has none.

    The text model's `model_type` selects among families of the same architecture, and those with a score head. Raises
    ValueError, with the supported architectures, for an unsupported model.
    """
    names = hf_config.get("architectures") or []
    if labels := count_labels(hf_config):
        for kind in (hf_config.get("model_type"), text_config(hf_config).get("model_type")):
            for family in FAMILIES:
                if kind == family.name:
                    return make_classifier(family, labels)
    families = [
        family
        for family in FAMILIES
        if set(names) & set(family.architectures) or (not names and hf_config.get("model_type") == family.name)
    ]
    text_type = text_config(hf_config).get("model_type")
    if len(families) > 1 and text_type:  # a vision-language architecture with one of several text models
        families = [family for family in families if family.name == text_type]
        names = [f"{name} with the text model {text_type!r}" for name in names]
    if families:
        return families[0]
    supported = ", ".join(dict.fromkeys(name for family in FAMILIES for name in family.architectures))
    name = f"architecture {', '.join(names)}" if names else f"model_type {hf_config.get('model_type')!r}"
    raise ValueError(f"config.json names the {name}, which this version does not support. It supports: {supported}")
