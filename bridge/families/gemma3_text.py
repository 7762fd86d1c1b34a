"""Gemma 3 text: five of six layers have a window and another rope; four norms in each layer.

Norm weights are stored as differences from 1, the embedding is scaled by the square root of its width, and queries and
keys have a norm per head. From 4B on, checkpoints are Gemma3ForConditionalGeneration, beside SigLIP's tower: images
have one size, and the visual tokens of one attend to each other in both directions.
"""

import math
from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Vision
from ..mapping.param_mapping import Family, ParamMapping
from . import siglip
from .decoder import (
    DEFAULTS,
    ENDS,
    PROJECTIONS,
    QK_NORMS,
    attention_biases,
    describe_decoder,
    mlp,
    read_ropes,
    sliding_layers,
)
from .gemma2 import FOUR_NORMS
from .vision_tower import TowerTable
from .vlm_text import (
    NESTED_MODULES,
    PROJECTOR,
    TOWER_AND_PROJECTOR,
    add_language_model_prefix,
    nest_in_language_model,
    text_config,
)

GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4


def architecture(config: HfConfig) -> Architecture:
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise ValueError(f"config.json has {key} {config[key]!r}: no released Gemma 3 text model has it")
    bias, pattern = config["attention_bias"], config["sliding_window_pattern"]
    ropes = read_ropes(
        config,
        config["head_dim"],
        full_base=config.get("rope_theta") or GLOBAL_BASE,
        sliding_base=config.get("rope_local_base_freq") or LOCAL_BASE,
    )
    layers = sliding_layers(config, [(layer + 1) % pattern != 0 for layer in range(config["num_hidden_layers"])])
    return describe_decoder(
        config | {"hidden_act": config["hidden_activation"]},
        {
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
            "add_qkv_bias": bias,
        },
        ropes=ropes,
        layers=tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in layers),
        embedding_scale=math.sqrt(config["hidden_size"]),
        post_norms=True,
        output_bias=bias,
        passthrough=TOWER_AND_PROJECTOR,
        module_names=siglip.MODULES + NESTED_MODULES,
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + FOUR_NORMS + PROJECTIONS + attention_biases(config) + QK_NORMS + mlp()


def vision(hf_config: HfConfig) -> Vision:
    settings = siglip.tower_settings(hf_config)
    side, tokens = settings["grid_side"], hf_config.get("mm_tokens_per_image", 256)
    tokens_per_side = math.isqrt(tokens)
    if not tokens or tokens_per_side**2 != tokens or side % tokens_per_side:
        raise ValueError(
            f"config.json has mm_tokens_per_image {tokens}: the {side} x {side} patches of an image cannot be divided "
            "into so many squares"
        )
    text = TEXT_DEFAULTS | hf_config["text_config"]
    return Vision(
        **settings,
        output_size=text["hidden_size"],
        merge_size=side // tokens_per_side,
        final_norm=True,
        pools_squares=True,
    )


def vision_mappings(vision: Vision) -> list[ParamMapping]:
    projector = TowerTable(vision)
    projector.add("mm_soft_emb_norm.weight", "merger.norm.weight")
    projector.add("mm_input_projection_weight", "merger.projection")
    return siglip.tower_mappings(vision) + projector.under(PROJECTOR, "model." + PROJECTOR)


TEXT_DEFAULTS = DEFAULTS | {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
}
FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    models="Gemma 3",
    architecture=architecture,
    mappings=mappings,
    text_config=text_config,
    vision=vision,
    vision_mappings=vision_mappings,
    vlm_names=(nest_in_language_model, add_language_model_prefix),
    limits=(
        "soft caps on scores and logits",
        "use_bidirectional_attention",
        "images that are cut into crops (do_pan_and_scan)",
    ),
    defaults=TEXT_DEFAULTS,
)
