"""Vision tower of Llama 4: tiles of one size, which attend by themselves, each with a class token and a 2-D rope.

An MLP over each square of patches ends the tower, and one matrix is its projector.
"""

from ..mapping.architecture import Architecture, HfConfig, Vision
from ..mapping.param_mapping import ParamMapping, ShardingKind, Span
from .decoder import check_supported
from .vision_tower import REPLICATED_Q_K_V, TowerTable, separate_heads_together
from .vlm_text import PROJECTOR, vision_config

EPS = 1e-5  # torch's LayerNorm's, which all norms of the tower are; norm_eps of config.json is not read
# Of transformers' class, but for config.json without a vision_config, which has no tower here.
VISION_DEFAULTS: HfConfig = {
    "hidden_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_channels": 3,
    "intermediate_size": 5632,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}
TOWER = "vision_model."
MERGE = 2  # side of a square in patches: that of a pixel_shuffle_ratio of 0.5
LIMITS = ("Llama4ForConditionalGeneration: videos, and a pixel_shuffle_ratio other than 0.5",)


def vision(hf_config: HfConfig, text_defaults: HfConfig) -> Vision:
    """Return the tower of a raw config.json. text_defaults: of the text model's class"""
    config = vision_config(hf_config, VISION_DEFAULTS)
    size = config["projector_output_dim"]
    check_supported(
        config,
        {
            "pixel_shuffle_ratio": (1 / MERGE,),
            "projector_input_dim": (size,),
            "vision_output_dim": (size,),
            "intermediate_size": (MERGE**2 * config["hidden_size"],),  # width of the MLP over a square, too
            "attention_dropout": (0,),
            "projector_dropout": (0,),
            "vision_feature_select_strategy": ("default",),
        },
    )
    for key in ("image_size", "patch_size"):
        if not isinstance(config[key], int):
            raise ValueError(f"config.json has {key} {config[key]}: only squares are supported. Set one number")
    return Vision(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        output_size=(text_defaults | hf_config["text_config"])["hidden_size"],
        patch_size=config["patch_size"],
        temporal_patch_size=1,
        merge_size=MERGE,
        channels=config["num_channels"],
        eps=EPS,
        activation="gelu",
        rope_base=config["rope_base"],
        patch_bias=False,
        is_patch_matrix=True,
        grid_side=config["image_size"] // config["patch_size"],
        class_token=True,
        embedding_norm=True,
        final_norm=True,
        square_mlp_size=size,
    )


def _class_token_first(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    return [Span(0, length - 1, length), Span(0, 0, length - 1)]


def _paired_heads_together(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out the heads as `separate_heads_together`, of a rope that turns pairs of neighbours, width before height.

    A pair of the tower's rope are elements of the two halves of a head, the planes of height before those of width.
    """
    spans = []
    for number, span in enumerate(separate_heads_together(length, ranks, architecture)):
        part, middle = span.part, (span.start + span.stop) // 2
        halves = (middle, span.stop), (span.start, middle)
        is_rotated = number % 3 < 2
        rotated = [Span(part, start + first, stop, 2) for first in (0, 1) for start, stop in halves]
        spans += rotated if is_rotated else [span]
    return spans


CLASS_TOKEN_LAST = ShardingKind(None, _class_token_first)
PAIRED_Q_K_V = ShardingKind(None, _paired_heads_together, REPLICATED_Q_K_V.parts)


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    tower, projector = TowerTable(vision), TowerTable(vision)
    tower.linear("patch_embedding.linear", "patch_embed", bias=False)
    tower.add("class_embedding", "class_token.weight")
    tower.add("positional_embedding_vlm", "position_embeddings.weight", CLASS_TOKEN_LAST)
    tower.norm("layernorm_pre", "embedding_norm")
    tower.norm("layernorm_post", "final_norm")
    hf, mcore, layers = "model.layers.{layer}.", "layers.{layer}.", tower.layers
    tower.norm(hf + "input_layernorm", mcore + "norm1", layers)
    tower.norm(hf + "post_attention_layernorm", mcore + "norm2", layers)
    tower.linear(hf + "self_attn.{part}_proj", mcore + "linear_qkv", PAIRED_Q_K_V, layers, bias=True)
    tower.linear(hf + "self_attn.o_proj", mcore + "linear_proj", layers=layers, bias=True)
    tower.linear(hf + "mlp.fc1", mcore + "linear_fc1", layers=layers, bias=True)
    tower.linear(hf + "mlp.fc2", mcore + "linear_fc2", layers=layers, bias=True)
    tower.linear("vision_adapter.mlp.fc1", "downsample.linear_fc1", bias=False)
    tower.linear("vision_adapter.mlp.fc2", "downsample.linear_fc2", bias=False)
    projector.linear("linear_1", "merger.linear_proj", bias=False)
    return tower.under(TOWER) + projector.under(PROJECTOR)
