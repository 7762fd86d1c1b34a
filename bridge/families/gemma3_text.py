"""Gemma 3 text: five layers of six attend to a window and turn by a rule of their own; four norms in each layer.

Norms are stored as what is added to 1, the embedding is multiplied by the root of its width, and queries and keys have
norms on each head. The checkpoints from 4B on are of Gemma3ForConditionalGeneration: their text model is what is
trained.
"""

import math
from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import REPLICATED, Architecture, Family, Row
from .decoder import (
    ENDS,
    HF_LAYER,
    LAYER,
    PROJECTIONS,
    QK_NORMS,
    attention_biases,
    describe_decoder,
    mlp,
    rope,
    windowed,
    with_defaults,
)
from .vlm_text import inner, outer, spelled, text_config

# transformers' Gemma3TextConfig
DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
}
GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4


def describe(config: dict[str, Any]) -> Architecture:
    config = text_config(config)
    settings = with_defaults(config, DEFAULTS)
    settings |= {"hidden_act": settings["hidden_activation"]}
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise ValueError(f"config.json has {key} {config[key]!r}: no released Gemma 3 text model has it")
    bias = bool(config.get("attention_bias"))
    everywhere, nearby = _rope_settings(config)
    architecture = describe_decoder(
        config | everywhere,
        settings,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        softmax_scale=settings["query_pre_attn_scalar"] ** -0.5,
        add_qkv_bias=bias,
    )
    number, pattern = settings["num_hidden_layers"], settings["sliding_window_pattern"]
    kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(number)]
    layers = windowed(config, number, default=kinds)
    local = rope(config | nearby, settings["head_dim"], settings["max_position_embeddings"])
    return replace(
        architecture,
        ropes=(*architecture.ropes, local),
        layers=tuple(replace(layer, rope=0 if layer.window is None else 1) for layer in layers),
        embedding_scale=math.sqrt(settings["hidden_size"]),
        post_norms=True,
        output_bias=bias,
        carried=r"(model\.)?(vision_tower|multi_modal_projector)\.",
    )


def _rope_settings(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json says of the two rules, each as a model with one rule would have it: of layers that attend to
    everything (rope_theta and rope_scaling, where the older names are there) and of those with a window. As in
    transformers, rope_scaling goes over what rope_parameters says."""
    named = config.get("rope_parameters") or {}
    full = dict(named.get("full_attention") or {}) | dict(config.get("rope_scaling") or {})
    local = dict(named.get("sliding_attention") or {})
    one = {"rope_scaling": None}
    return (
        one | {"rope_parameters": {"rope_theta": config.get("rope_theta") or GLOBAL_BASE} | full},
        one | {"rope_parameters": {"rope_theta": config.get("rope_local_base_freq") or LOCAL_BASE} | local},
    )


def rows(config: dict[str, Any]) -> list[Row]:
    norms = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "self_attn_bda.norm",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "mlp_bda.norm",
    }
    four = [Row(HF_LAYER + hf + ".weight", LAYER + mcore + ".weight", REPLICATED) for hf, mcore in norms.items()]
    alone = ENDS + four + PROJECTIONS + attention_biases(text_config(config)) + QK_NORMS + mlp()
    return spelled(config, alone, outer, inner)


FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    models="Gemma 3, text",
    describe=describe,
    rows=rows,
    limits=(
        "soft caps on scores and logits",
        "use_bidirectional_attention",
        "images: the vision tower is carried along unchanged",
    ),
)
