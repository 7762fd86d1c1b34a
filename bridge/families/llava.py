"""LLaVA 1.5: CLIP's tower beside Llama's decoder (https://arxiv.org/abs/2310.03744).

An image is cropped to one square, whose features come from a layer before the tower's last, without its class token.
"""

from ..mapping.architecture import HfConfig, Projector, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import siglip
from .decoder import check_supported
from .vision_tower import ACTIVATIONS, TowerTable
from .vlm_text import (
    NESTED_MODULES,
    PROJECTOR,
    vision_config,
    with_nested_text,
)

ARCHITECTURE = "LlavaForConditionalGeneration"
LAYER = -2  # layer whose output is used: transformers' default of vision_feature_layer
# Of transformers' class, but for config.json without a vision_config, which has no tower here.
VISION_DEFAULTS: HfConfig = {
    "model_type": "clip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
LIMITS = (f"{ARCHITECTURE}: towers other than CLIP's, features of several layers or with the class token, videos",)


def with_tower(family: Family) -> Family:
    """Return a family of language models that is also the text model of LLaVA."""
    return with_nested_text(
        family,
        ARCHITECTURE,
        vision=vision,
        vision_mappings=vision_mappings,
        limits=LIMITS,
        module_names=siglip.MODULES + NESTED_MODULES,
    )


def vision(hf_config: HfConfig, text_defaults: HfConfig) -> Vision:
    """Return the tower of a raw config.json. text_defaults: of the text model's class"""
    config = vision_config(hf_config, VISION_DEFAULTS)
    check_supported(
        config, {"model_type": ("clip_vision_model",), "attention_dropout": (0,), "hidden_act": ACTIVATIONS}
    )
    check_supported(hf_config, {"vision_feature_select_strategy": ("default",), "projector_hidden_act": ACTIVATIONS})
    layers, layer = config["num_hidden_layers"], hf_config.get("vision_feature_layer", LAYER)
    if not isinstance(layer, int) or not -layers <= layer < 0:
        raise ValueError(
            f"config.json has vision_feature_layer {layer}: this family is supported with one layer, counted from the "
            f"last one, -1, to -{layers}"
        )
    return Vision(
        num_layers=layers + 1 + layer,
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        output_size=(text_defaults | hf_config["text_config"])["hidden_size"],
        patch_size=config["patch_size"],
        temporal_patch_size=1,
        merge_size=1,
        channels=config["num_channels"],
        eps=config["layer_norm_eps"],
        activation=config["hidden_act"],
        rope_base=None,
        patch_bias=False,
        grid_side=config["image_size"] // config["patch_size"],
        class_token=True,
        embedding_norm=True,
        projector=Projector(
            eps=None,
            bias=hf_config.get("multimodal_projector_bias", True),
            activation=hf_config.get("projector_hidden_act", "gelu"),
            reduces_squares=False,
        ),
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    assert vision.projector is not None
    tower, projector = TowerTable(vision), TowerTable(vision)
    tower.add("embeddings.class_embedding", "class_token.weight")
    tower.add("embeddings.position_embedding.weight", "position_embeddings.weight")
    tower.linear("embeddings.patch_embedding", "patch_embed", bias=False)
    tower.norm("pre_layrnorm", "embedding_norm")
    siglip.map_layers(tower)
    projector.linear("linear_1", "merger.linear_fc1", bias=vision.projector.bias)
    projector.linear("linear_2", "merger.linear_fc2", bias=vision.projector.bias)
    return tower.under(*siglip.TOWERS) + projector.under(PROJECTOR, "model." + PROJECTOR)
