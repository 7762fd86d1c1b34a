"""Ovis2: AIMv2's tower and a vocabulary of visual words, beside Qwen2's decoder (https://arxiv.org/abs/2405.20797).

A square of patches has probabilities over visual words, which weigh the rows of an embedding table. The last rows are
those of the tokens around and between the tiles of an image.
"""

from dataclasses import replace

from ..mapping.architecture import INDICATORS, Architecture, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import qwen2
from .decoder import check_supported
from .vision_tower import ACTIVATIONS, REPLICATED_GATE_UP, REPLICATED_Q_K_V, TowerTable
from .vlm_text import add_language_model_prefix, nested_text_config, vision_config

TABLE = "visual_embeddings_table."
TOWER = "vision_tower."
# Of transformers' class, but for config.json without a vision_config, which has no tower here.
VISION_DEFAULTS: HfConfig = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "qkv_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "vocab_size": 16384,
    "hidden_stride": 1,
}


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"model_type": ("qwen2",)})
    return replace(qwen2.architecture(config), passthrough=rf"model\.({TOWER}|{TABLE})")


def vision(hf_config: HfConfig) -> Vision:
    """Return the tower of a raw config.json."""
    text = qwen2.FAMILY.defaults | hf_config["text_config"]
    config = vision_config(hf_config, VISION_DEFAULTS)
    check_supported(
        config,
        {
            "hidden_act": ACTIVATIONS,
            "attention_dropout": (0,),
            "tokenize_function": ("softmax",),
            "num_visual_indicator_tokens": (INDICATORS,),
            "mlp_bias": (config["qkv_bias"],),  # qkv_bias is that of attention's output, too
        },
    )
    check_supported(hf_config, {name: (text[name],) for name in ("hidden_size", "vocab_size")})
    image, patch, stride = (config[name] for name in ("image_size", "patch_size", "hidden_stride"))
    if not (isinstance(image, int) and isinstance(patch, int)) or image // patch % stride:
        raise ValueError(
            f"config.json has image_size {image}, patch_size {patch} and hidden_stride {stride}: only squares of whole "
            "visual tokens are supported"
        )
    return Vision(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        output_size=text["hidden_size"],
        patch_size=patch,
        temporal_patch_size=1,
        merge_size=stride,
        channels=config["num_channels"],
        normalization="RMSNorm",
        eps=config["rms_norm_eps"],
        gated=True,
        activation=config["hidden_act"],
        rope_base=None,
        qkv_bias=config["qkv_bias"],
        layer_bias=config["mlp_bias"],
        patch_norm=True,
        grid_side=image // patch,
        final_norm=True,
        visual_words=config["vocab_size"],
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    tower, table = TowerTable(vision), TowerTable(vision)
    tower.linear("transformer.embeddings.patch_embedding", "patch_embed", bias=True)
    tower.norm("transformer.embeddings.rms_norm", "patch_norm")
    tower.add("transformer.embeddings.position_embedding.weight", "position_embeddings.weight")
    hf, mcore, layers = "transformer.encoder.layers.{layer}.", "layers.{layer}.", tower.layers
    tower.norm(hf + "rms_norm1", mcore + "norm1", layers)
    tower.norm(hf + "rms_norm2", mcore + "norm2", layers)
    attention, bias = hf + "attention.", vision.layer_bias
    tower.linear(attention + "{part}_proj", mcore + "linear_qkv", REPLICATED_Q_K_V, layers, bias=vision.qkv_bias)
    tower.linear(attention + "out_proj", mcore + "linear_proj", layers=layers, bias=bias)
    tower.linear(hf + "ffn.{part}_proj", mcore + "linear_fc1", REPLICATED_GATE_UP, layers, bias=bias)
    tower.linear(hf + "ffn.down_proj", mcore + "linear_fc2", layers=layers, bias=bias)
    tower.norm("transformer.rms_norm", "final_norm")
    tower.linear("head_linear", "merger.linear_fc1", bias=False)
    tower.norm("head_norm", "merger.norm", kind="LayerNorm")
    table.add("weight", "merger.words")
    return tower.under("model." + TOWER) + table.under("model." + TABLE)


FAMILY = Family(
    name="ovis2",
    architectures=("Ovis2ForConditionalGeneration",),
    models="Ovis2 as transformers names it (1B to 34B)",
    architecture=architecture,
    mappings=qwen2.mappings,
    text_config=nested_text_config,
    vision=vision,
    vision_mappings=vision_mappings,
    vlm_names=(add_language_model_prefix,),
    defaults=qwen2.FAMILY.defaults,
    limits=("text models other than Qwen2, a tokenize_function other than softmax, checkpoints named as Ovis",),
)
