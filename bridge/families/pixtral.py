"""Pixtral's vision tower beside Mistral's decoders: Mistral Small 3.1 and 3.2, Ministral 3."""

from ..mapping.architecture import HfConfig, Projector, Vision
from ..mapping.param_mapping import ParamMapping
from .decoder import check_supported
from .vision_tower import ACTIVATIONS, REPLICATED_GATE_UP, REPLICATED_Q_K_V, TowerTable
from .vlm_text import PROJECTOR, TOWER, vision_config

EPS = 1e-5  # epsilon of the tower's norms; config.json has none

# Of transformers' class, but for config.json without a vision_config, which has no tower here.
VISION_DEFAULTS: HfConfig = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu",
}


def vision(hf_config: HfConfig, text_defaults: HfConfig) -> Vision:
    """Return the tower of a raw config.json. text_defaults: of the text model's class"""
    config = vision_config(hf_config, VISION_DEFAULTS)
    check_supported(config, {"model_type": ("pixtral",), "attention_dropout": (0,), "hidden_act": ACTIVATIONS})
    check_supported(hf_config, {"vision_feature_layer": (-1,), "projector_hidden_act": ACTIVATIONS})
    if not isinstance(config["patch_size"], int):
        raise ValueError(f"config.json has patch_size {config['patch_size']}: patches are squares here. Set one number")
    text = text_defaults | hf_config["text_config"]
    return Vision(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        output_size=text["hidden_size"],
        patch_size=config["patch_size"],
        temporal_patch_size=1,
        merge_size=hf_config.get("spatial_merge_size", 2),
        channels=config["num_channels"],
        normalization="RMSNorm",
        eps=EPS,
        gated=True,
        activation=config["hidden_act"],
        rope_base=config["rope_base"],
        rope_alternates=True,
        patch_bias=False,
        qkv_bias=False,
        layer_bias=False,
        patch_norm=True,
        projector=Projector(
            eps=text["rms_norm_eps"],
            bias=hf_config.get("multimodal_projector_bias", False),
            activation=hf_config.get("projector_hidden_act", "gelu"),
            reduces_squares=True,
        ),
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    assert vision.projector is not None
    tower, projector = TowerTable(vision), TowerTable(vision)
    tower.linear("patch_conv", "patch_embed", bias=False)
    tower.norm("ln_pre", "patch_norm")
    hf, mcore, layers = "transformer.layers.{layer}.", "layers.{layer}.", tower.layers
    tower.norm(hf + "attention_norm", mcore + "norm1", layers)
    tower.norm(hf + "ffn_norm", mcore + "norm2", layers)
    tower.linear(hf + "attention.{part}_proj", mcore + "linear_qkv", REPLICATED_Q_K_V, layers, bias=False)
    tower.linear(hf + "attention.o_proj", mcore + "linear_proj", layers=layers, bias=False)
    tower.linear(hf + "feed_forward.{part}_proj", mcore + "linear_fc1", REPLICATED_GATE_UP, layers, bias=False)
    tower.linear(hf + "feed_forward.down_proj", mcore + "linear_fc2", layers=layers, bias=False)
    projector.norm("norm", "merger.norm", kind="RMSNorm")
    projector.linear("patch_merger.merging_layer", "merger.linear_merge", bias=False)
    projector.linear("linear_1", "merger.linear_fc1", bias=vision.projector.bias)
    projector.linear("linear_2", "merger.linear_fc2", bias=vision.projector.bias)
    return tower.under(TOWER, "model." + TOWER) + projector.under(PROJECTOR, "model." + PROJECTOR)
