"""SigLIP's tower: images of one size, learned positions, no class token (https://arxiv.org/abs/2303.15343)."""

from typing import Any

from ..mapping.architecture import HfConfig, Vision
from ..mapping.param_mapping import ParamMapping
from .decoder import check_supported
from .vision_tower import ACTIVATIONS, REPLICATED_Q_K_V, TowerTable
from .vlm_text import TOWER, vision_config

# Of transformers' class, but for config.json without a vision_config, which has no tower here.
VISION_DEFAULTS: HfConfig = {
    "model_type": "siglip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
# Files of transformers before 5 have the tower in another module.
TOWERS = TOWER + "vision_model.", TOWER, "model." + TOWER, "model." + TOWER + "vision_model."
MODULES = ((r"^(model\.)?vision_tower\.vision_model\.", "model.vision_tower."),)  # Architecture.module_names


def tower_settings(hf_config: HfConfig) -> dict[str, Any]:
    """Return the arguments of `Vision` that a tower in a raw config.json decides by itself."""
    config = vision_config(hf_config, VISION_DEFAULTS)
    check_supported(
        config,
        {"model_type": ("siglip_vision_model",), "attention_dropout": (0,), "hidden_act": ACTIVATIONS},
    )
    image, patch = config["image_size"], config["patch_size"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "patch_size": patch,
        "temporal_patch_size": 1,
        "channels": config["num_channels"],
        "eps": config["layer_norm_eps"],
        "activation": config["hidden_act"],
        "rope_base": None,
        "grid_side": image // patch,
    }


def tower_mappings(vision: Vision) -> list[ParamMapping]:
    tower = TowerTable(vision)
    tower.linear("embeddings.patch_embedding", "patch_embed", bias=True)
    tower.add("embeddings.position_embedding.weight", "position_embeddings.weight")
    map_layers(tower)
    if vision.final_norm:
        tower.norm("post_layernorm", "final_norm")
    return tower.under(*TOWERS)


def map_layers(tower: TowerTable) -> None:
    """Map the layers of a tower whose tensors are named as CLIP's."""
    hf, mcore, layers = "encoder.layers.{layer}.", "layers.{layer}.", tower.layers
    tower.norm(hf + "layer_norm1", mcore + "norm1", layers)
    tower.norm(hf + "layer_norm2", mcore + "norm2", layers)
    tower.linear(hf + "self_attn.{part}_proj", mcore + "linear_qkv", REPLICATED_Q_K_V, layers, bias=True)
    tower.linear(hf + "self_attn.out_proj", mcore + "linear_proj", layers=layers, bias=True)
    tower.linear(hf + "mlp.fc1", mcore + "linear_fc1", layers=layers, bias=True)
    tower.linear(hf + "mlp.fc2", mcore + "linear_fc2", layers=layers, bias=True)
