"""Gemma 4 12B: Gemma 4's dense text model; visual tokens are embedded patches, without a transformer before them.

The patches of images and their positions have norms. This embedder is a vision tower without layers here.
"""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import gemma4_text
from .decoder import check_supported
from .gemma4_vision import EMBEDDER
from .vision_tower import REPLICATED_CHANNELS_FIRST, TowerTable
from .vlm_text import vision_config

DENSE = gemma4_text.FAMILY
PATCHES = "vision_embedder."
LAYER_NORM_EPS = 1e-5  # config.json has none
# Names of transformers' modules, which files do not have.
MODULES = (
    (r"^model\.embed_vision\.embedding_projection", "model.embed_vision.multimodal_embedder.embedding_projection"),
    (r"^model\.vision_embedder\.", "model.embed_vision."),
)
# Of transformers' class, but for config.json without a vision_config, whose images are not supported here.
VISION_DEFAULTS: HfConfig = {
    "model_type": "gemma4_unified_vision",
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "rms_norm_eps": 1e-6,
    "output_proj_dims": 3840,
}


def architecture(config: HfConfig) -> Architecture:
    return replace(gemma4_text.architecture(config), module_names=MODULES)


def vision(hf_config: HfConfig) -> Vision:
    text = FAMILY.defaults | hf_config["text_config"]
    config = vision_config(hf_config, VISION_DEFAULTS)
    size = config["mm_embed_dim"]
    check_supported(config, {"model_type": ("gemma4_unified_vision",), "output_proj_dims": (size,)})
    return Vision(
        num_layers=0,
        hidden_size=size,
        ffn_hidden_size=0,
        num_heads=1,
        output_size=text["hidden_size"],
        eps=LAYER_NORM_EPS,
        patch_size=config["patch_size"] * config["pooling_kernel_size"],
        temporal_patch_size=1,
        merge_size=1,
        rope_base=None,
        is_patch_matrix=True,
        is_channels_last=True,
        pixel_norm=True,
        patch_norm=True,
        axis_positions=config["mm_posemb_size"],
        alternates_axes=True,
        embedding_norm=True,
        merger_eps=config["rms_norm_eps"],
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    patches, embedder = TowerTable(vision), TowerTable(vision)
    patches.linear("patch_ln1", "pixel_norm", REPLICATED_CHANNELS_FIRST, bias=True)
    patches.linear("patch_dense", "patch_embed", bias=True)
    patches.norm("patch_ln2", "patch_norm")
    patches.add("pos_embedding", "position_embeddings.weight")
    patches.norm("pos_norm", "embedding_norm")
    embedder.linear("embedding_projection", "merger.linear_proj", bias=False)
    return patches.under("model." + PATCHES) + embedder.under("model." + EMBEDDER)


FAMILY = Family(
    name="gemma4_unified_text",
    architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    models="Gemma 4 12B",
    architecture=architecture,
    mappings=gemma4_text.mappings,
    text_config=DENSE.text_config,
    vision=vision,
    vision_mappings=vision_mappings,
    vlm_names=DENSE.vlm_names,
    limits=(
        "attention_bias",
        "videos and audio: the audio embedder passes through unchanged",
    ),
    defaults=DENSE.defaults
    | {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144},
)
