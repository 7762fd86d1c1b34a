"""InternVL 3 and 3.5: InternViT's tower beside Qwen's decoders (https://arxiv.org/abs/2508.18265).

Images are cut into tiles of one size, which attend by themselves, each with a class token. Checkpoints have the naming
of transformers, or that of InternVLChatModel, whose code comes with them: here it is read and written, and never run.
"""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Projector, Vision
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import check_supported
from .vision_tower import ACTIVATIONS, REPLICATED_Q_K_V, REPLICATED_QKV, TowerTable
from .vlm_text import (
    PROJECTOR,
    TOWER,
    TOWER_AND_PROJECTOR,
    nested_text_config,
    text_config,
    vision_config,
    with_nested_text,
)

ARCHITECTURE, CHAT_ARCHITECTURE = "InternVLForConditionalGeneration", "InternVLChatModel"
CHAT = "internvl_chat"  # model_type of config.json
CHAT_TOWER_TYPE = "intern_vit_6b"  # model_type of its vision_config, of towers of every size
CHAT_TEXT = "llm_config"  # its name of text_config
CHAT_TOWER, CHAT_PROJECTOR = "vision_model.", "mlp1."
# Its names of the tower's settings.
CHAT_VISION_NAMES = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm", "dropout": "hidden_dropout_prob"}
CHAT_DEFAULTS: HfConfig = {
    "downsample_ratio": 0.5,
    "dynamic_image_size": False,
    "force_image_size": None,
    "max_dynamic_patch": 6,
    "min_dynamic_patch": 1,
    "pad2square": False,
    "ps_version": "v1",
    "select_layer": -1,
    "use_thumbnail": False,
}  # of its class
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
LIMITS = (
    f"{ARCHITECTURE} and {CHAT_ARCHITECTURE}: towers with use_qk_norm or qk_normalization (InternViT-6B), and videos",
)


def with_tower(family: Family) -> Family:
    """Return a family of language models that is also the text model of InternVL."""
    nested = with_nested_text(family, ARCHITECTURE, vision=vision, vision_mappings=vision_mappings, limits=LIMITS)

    def architecture(config: HfConfig) -> Architecture:
        decoder = nested.architecture(config)
        if not _is_chat(config):
            return decoder
        # Of files, whose names modules have too, and of transformers' model, in adapters that leave out the tower.
        pattern = rf"{CHAT_TOWER[:-1]}\.|{CHAT_PROJECTOR[:-1]}\.|{TOWER_AND_PROJECTOR}"
        return replace(decoder, passthrough=pattern, module_names=())

    return replace(
        nested,
        architectures=(*nested.architectures, CHAT_ARCHITECTURE),
        architecture=architecture,
        # The language model of InternVLChatModel is a causal model, which follows its own settings.
        text_config=lambda config: (
            text_config(config, use_inner_tie=True) if _is_chat(config) else nested_text_config(config)
        ),
    )


def lift_language_model(config: HfConfig) -> HfConfig:
    """Return a config.json of InternVLChatModel with `text_config` in place of `llm_config`; others as they are."""
    if not isinstance(config, dict) or config.get("model_type") != CHAT or "text_config" in config:
        return config
    return {"text_config" if name == CHAT_TEXT else name: value for name, value in config.items()}


def lower_language_model(config: HfConfig) -> HfConfig:
    """Return the config.json that `lift_language_model` has lifted, with what has been changed since."""
    if config.get("model_type") != CHAT:
        return config
    return {CHAT_TEXT if name == "text_config" else name: value for name, value in config.items()}


def _is_chat(config: HfConfig) -> bool:
    return (config.get("vision_config") or {}).get("model_type") == CHAT_TOWER_TYPE


def usual_settings(hf_config: HfConfig) -> HfConfig:
    """Return a lifted config.json of InternVLChatModel with transformers' names of settings.

    Raises ValueError for settings that transformers' class does not have.
    """
    config, raw = CHAT_DEFAULTS | hf_config, hf_config["vision_config"]
    check_supported(raw, {"qk_normalization": (False,), "dropout": (0,)})
    side = _side(VISION_DEFAULTS | raw, "image_size")
    # Squares of patches are put together in the order of v2: v1 transposes them.
    supported = {"ps_version": ("v2",), "pad2square": (False,), "force_image_size": (side,), "select_layer": (-1,)}
    check_supported(config, supported | ({"use_thumbnail": (True,)} if config["dynamic_image_size"] else {}))
    names = {name: CHAT_VISION_NAMES.get(name, name) for name in raw if name != "model_type"}
    tower = {names[name]: raw[name] for name in names}
    settings = {name: value for name, value in hf_config.items() if name != "select_layer"}
    tie = hf_config["text_config"].get("tie_word_embeddings", False)
    return settings | {"vision_config": tower, "tie_word_embeddings": tie}


def vision(hf_config: HfConfig, text_defaults: HfConfig) -> Vision:
    """Return the tower of a raw config.json. text_defaults: of the text model's class"""
    is_chat = _is_chat(hf_config)
    if is_chat:
        hf_config = usual_settings(hf_config)
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
        has_code_names=is_chat,
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
    tower, projector, chat_tower, chat_projector = (TowerTable(vision) for _ in range(4))
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
    chat_tower.add("embeddings.class_embedding", "class_token.weight")
    chat_tower.add("embeddings.position_embedding", "position_embeddings.weight")
    chat_tower.linear("embeddings.patch_embedding", "patch_embed", bias=True)
    chat = "encoder.layers.{layer}."
    chat_tower.norm(chat + "norm1", mcore + "norm1", layers)
    chat_tower.norm(chat + "norm2", mcore + "norm2", layers)
    chat_tower.add(chat + "ls1", mcore + "scale1", layers=layers)
    chat_tower.add(chat + "ls2", mcore + "scale2", layers=layers)
    chat_tower.linear(chat + "attn.qkv", mcore + "linear_qkv", REPLICATED_QKV, layers, bias=vision.qkv_bias)
    chat_tower.linear(chat + "attn.proj", mcore + "linear_proj", layers=layers, bias=True)
    for table, prefix in ((tower, hf), (chat_tower, chat)):
        table.linear(prefix + "mlp.fc1", mcore + "linear_fc1", layers=layers, bias=True)
        table.linear(prefix + "mlp.fc2", mcore + "linear_fc2", layers=layers, bias=True)
    for table, names in ((projector, ("layer_norm", "linear_1", "linear_2")), (chat_projector, ("0", "1", "3"))):
        norm, fc1, fc2 = names
        table.norm(norm, "merger.norm", kind="LayerNorm")
        table.linear(fc1, "merger.linear_fc1", bias=True)
        table.linear(fc2, "merger.linear_fc2", bias=True)
    mappings = tower.under(TOWER, "model." + TOWER) + projector.under(PROJECTOR, "model." + PROJECTOR)
    chat_mappings = chat_tower.under(CHAT_TOWER) + chat_projector.under(CHAT_PROJECTOR)
    return chat_mappings + mappings if vision.has_code_names else mappings + chat_mappings
