"""GLM-4.5V and 4.6V: GLM-4.5's decoder with positions on three axes, beside GLM-4.1V's vision tower."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from . import glm4_moe, glm4v_text
from .deepseek_moe import LIMITS
from .qwen2_5_vl_text import text_config
from .vlm_text import add_language_model_prefix

NO_NORMS = {"use_qk_norm": False}  # transformers' class has none, whatever config.json says


def architecture(config: HfConfig) -> Architecture:
    return glm4v_text.beside_tower(glm4_moe.architecture(config | NO_NORMS), config)


def mappings(config: HfConfig) -> list[ParamMapping]:
    return glm4_moe.mappings(config | NO_NORMS)


FAMILY = Family(
    name="glm4v_moe_text",
    architectures=("Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"),
    models="GLM-4.5V, GLM-4.6V",
    architecture=architecture,
    mappings=mappings,
    text_config=text_config,
    vision=glm4v_text.vision,
    vision_mappings=glm4v_text.vision_mappings,
    vlm_names=(add_language_model_prefix,),
    limits=LIMITS,
    defaults=glm4_moe.FAMILY.defaults
    | {"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True},
)
