"""InternVL 3 and 3.5 in transformers' naming: InternViT's tower beside Qwen's decoders.

Images are cut into tiles of one size, which attend by themselves, each with a class token.
"""

from ..mapping.architecture import HfConfig, Projector, Vision
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import check_supported
from .vision_tower import ACTIVATIONS, REPLICATED_Q_K_V, TowerTable
from .vlm_text import (
    PROJECTOR,
    TOWER,
    vision_config,
    with_nested_text,
)

ARCHITECTURE = "InternVLForConditionalGeneration"
VISION_DEFAULTS: HfConfig = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
}
SUPPORTED = {
    "use_qk_norm": (False,),
    "use_mask_token": (False,),
    "use_absolute_position_embeddings": (True,),
    "use_mean_pooling": (True,),
    "hidden_dropout_prob": (0,),
    "attention_dropout": (0,),
    "projection_dropout": (0,),
}
LIMITS = (f"{ARCHITECTURE}: towers with use_qk_norm (InternViT-6B), videos, and the naming of InternVLChatModel",)


def with_tower(family: Family) -> Family:
    """Return a family of language models that is also the text model of InternVL."""
    return with_nested_text(family, ARCHITECTURE, vision=vision, vision_mappings=vision_mappings, limits=LIMITS)


def vision(hf_config: HfConfig, text_defaults: HfConfig) -> Vision:
    """Return the tower of a raw config.json. text_defaults: of the text model's class"""
    config = vision_config(hf_config, VISION_DEFAULTS)
    check_supported(config, SUPPORTED | {"hidden_act": ACTIVATIONS, "norm_type": ("layer_norm", "rms_norm")})
    check_supported(
        hf_config,
        {
            "vision_feature_layer": (-1,),
            "vision_feature_select_strategy": ("default",),
            "downsample_ratio": (0.5,),
            "projector_hidden_act": ACTIVATIONS,
        },
    )
    image, patch = (_side(config, key) for key in ("image_size", "patch_size"))
    return Vision(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        output_size=(text_defaults | hf_config["text_config"])["hidden_size"],
        patch_size=patch,
        temporal_patch_size=1,
        merge_size=2,
        channels=config["num_channels"],
        normalization="LayerNorm" if config["norm_type"] == "layer_norm" else "RMSNorm",
        eps=config["layer_norm_eps"],
        activation=config["hidden_act"],
        rope_base=None,
        qkv_bias=config["attention_bias"],
        grid_side=image // patch,
        class_token=True,
        is_batched=True,
        layer_scale=True,
        projector=Projector(
            eps=1e-5, bias=True, activation=hf_config.get("projector_hidden_act", "gelu"), reduces_squares=False
        ),
    )


def _side(config: HfConfig, key: str) -> int:
    """Return the side of a square that config.json gives as one number or as two."""
    value = config[key]
    sides = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or sides[0] != sides[1]:
        raise ValueError(f"config.json has {key} {value}: only squares are supported")
    return sides[0]


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    tower, projector = TowerTable(vision), TowerTable(vision)
    tower.add("embeddings.cls_token", "class_token.weight")
    tower.add("embeddings.position_embeddings", "position_embeddings.weight")
    tower.linear("embeddings.patch_embeddings.projection", "patch_embed", bias=True)
    hf, mcore, layers = "encoder.layer.{layer}.", "layers.{layer}.", tower.layers
    tower.norm(hf + "layernorm_before", mcore + "norm1", layers)
    tower.norm(hf + "layernorm_after", mcore + "norm2", layers)
    tower.add(hf + "lambda_1", mcore + "scale1", layers=layers)
    tower.add(hf + "lambda_2", mcore + "scale2", layers=layers)
    qkv = hf + "attention.{part}_proj"
    tower.linear(qkv, mcore + "linear_qkv", REPLICATED_Q_K_V, layers, bias=vision.qkv_bias)
    tower.linear(hf + "attention.projection_layer", mcore + "linear_proj", layers=layers, bias=True)
    tower.linear(hf + "mlp.fc1", mcore + "linear_fc1", layers=layers, bias=True)
    tower.linear(hf + "mlp.fc2", mcore + "linear_fc2", layers=layers, bias=True)
    projector.norm("layer_norm", "merger.norm", kind="LayerNorm")
    projector.linear("linear_1", "merger.linear_fc1", bias=True)
    projector.linear("linear_2", "merger.linear_fc2", bias=True)
    return tower.under(TOWER, "model." + TOWER) + projector.under(PROJECTOR, "model." + PROJECTOR)
