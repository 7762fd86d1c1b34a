"""Gemma 4's tower: images of any size, positions on two axes, four norms in each layer.

https://ai.google.dev/gemma/docs/core/model_card_4. Means of squares of patches are visual tokens. Queries, keys and
values have norms, and scores no other scale.
"""

from itertools import product

from ..mapping.architecture import CLIP_BOUNDS, HfConfig, Vision
from ..mapping.param_mapping import SCALAR, ParamMapping
from .decoder import check_supported
from .vision_tower import (
    ACTIVATIONS,
    REPLICATED_GATE_UP,
    REPLICATED_HALVED_HEAD,
    REPLICATED_HALVED_Q_K_V,
    TowerTable,
)
from .vlm_text import TOWER, vision_config

EMBEDDER = "embed_vision."
ROPE_BASE = 100.0
# Of transformers' class, but for config.json without a vision_config, which has no tower here.
VISION_DEFAULTS: HfConfig = {
    "model_type": "gemma4_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "standardize": False,
    "use_clipped_linears": False,
}


def tower_settings(hf_config: HfConfig, output_size: int) -> Vision:
    """Return the tower of a raw config.json. output_size: the language model's hidden size"""
    config = vision_config(hf_config, VISION_DEFAULTS)
    heads, size = config["num_attention_heads"], config["hidden_size"]
    check_supported(
        config,
        {
            "model_type": ("gemma4_vision",),
            "hidden_activation": ACTIVATIONS,
            "num_key_value_heads": (heads,),
            "attention_bias": (False,),
            "attention_dropout": (0,),
        },
    )
    if config["head_dim"] * heads != size or config["head_dim"] % 4:
        raise ValueError(
            f"config.json has head_dim {config['head_dim']} in vision_config: supported is a multiple of 4 with "
            f"{heads} heads in the hidden size {size}"
        )
    rope = config.get("rope_parameters") or {}
    check_supported(rope, {"rope_type": ("axial", "default")})
    return Vision(
        num_layers=config["num_hidden_layers"],
        hidden_size=size,
        ffn_hidden_size=config["intermediate_size"],
        num_heads=heads,
        output_size=output_size,
        normalization="RMSNorm",
        eps=config["rms_norm_eps"],
        gated=True,
        activation=config["hidden_activation"],
        qkv_bias=False,
        layer_bias=False,
        post_norms=True,
        head_norms=True,
        softmax_scale=1.0,
        patch_size=config["patch_size"],
        temporal_patch_size=1,
        merge_size=config["pooling_kernel_size"],
        rope_base=rope.get("rope_theta", ROPE_BASE),
        patch_bias=False,
        is_patch_matrix=True,
        is_channels_last=True,
        axis_positions=config["position_embedding_size"],
        merger_eps=config["rms_norm_eps"],
        scales_means=True,
        standardizes=config["standardize"],
        clips=config["use_clipped_linears"],
    )


def tower_mappings(vision: Vision) -> list[ParamMapping]:
    tower, embedder = TowerTable(vision), TowerTable(vision)
    tower.linear("patch_embedder.input_proj", "patch_embed", bias=False)
    tower.add("patch_embedder.position_embedding_table", "position_embeddings.weight")
    hf, mcore, layers = "encoder.layers.{layer}.", "layers.{layer}.", tower.layers
    tower.norm(hf + "input_layernorm", mcore + "norm1", layers)
    tower.norm(hf + "post_attention_layernorm", mcore + "post_norm1", layers)
    tower.norm(hf + "pre_feedforward_layernorm", mcore + "norm2", layers)
    tower.norm(hf + "post_feedforward_layernorm", mcore + "post_norm2", layers)
    attention = hf + "self_attn."
    tower.linear(attention + "{part}_proj.linear", mcore + "linear_qkv", REPLICATED_HALVED_Q_K_V, layers, bias=False)
    for name in ("q_norm", "k_norm"):
        tower.linear(attention + name, mcore + name, REPLICATED_HALVED_HEAD, layers, bias=False)
    tower.linear(attention + "o_proj.linear", mcore + "linear_proj", layers=layers, bias=False)
    tower.linear(hf + "mlp.{part}_proj.linear", mcore + "linear_fc1", REPLICATED_GATE_UP, layers, bias=False)
    tower.linear(hf + "mlp.down_proj.linear", mcore + "linear_fc2", layers=layers, bias=False)
    if vision.clips:
        modules = {f"self_attn.{part}_proj": f"linear_qkv.{part}_" for part in "qkv"}
        modules |= {f"mlp.{part}_proj": f"linear_fc1.{part}_" for part in ("gate", "up")}
        modules |= {"self_attn.o_proj": "linear_proj.", "mlp.down_proj": "linear_fc2."}
        for (name, clipped), bound in product(modules.items(), CLIP_BOUNDS):
            tower.add(f"{hf}{name}.{bound}", mcore + clipped + bound, SCALAR, layers)
    if vision.standardizes:
        for name in ("std_bias", "std_scale"):
            tower.add(name, "downsample." + name)
    embedder.linear("embedding_projection", "merger.linear_proj", bias=False)
    return tower.under("model." + TOWER) + embedder.under("model." + EMBEDDER)
