"""Llama 4 text: three layers of four attend by chunks and turn, the fourth attends to everything and has no positions.

Queries and keys that turn are divided by their root mean square afterwards, queries of the other layers grow with their
position. A token has one expert, whose input is weighted by a sigmoid, and a shared one. The checkpoints on the hub are
of Llama4ForConditionalGeneration: their text model is what is trained.
"""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import FUSED_GATE_UP, GATE_UP, REPLICATED, ROW, Architecture, Family, Layer, Routing, Row
from .decoder import ATTENTION, ENDS, HF_LAYER, LAYER, attention_biases, dense_layers, describe_decoder, with_defaults
from .vlm_text import outer, spelled, text_config

# transformers' Llama4TextConfig
DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}


def describe(config: dict[str, Any]) -> Architecture:
    config = text_config(config, tied_inside=True)
    settings = with_defaults(config, DEFAULTS) | {"rope_interleaved": True}
    bias = bool(config.get("attention_bias"))
    moe, layers = moe_layers(settings), range(settings["num_hidden_layers"])
    architecture = describe_decoder(
        config,
        settings | {"intermediate_size": settings["intermediate_size_mlp"]},
        add_qkv_bias=bias,
        num_moe_experts=settings["num_local_experts"],
        moe_router_topk=settings["num_experts_per_tok"],
        moe_router_score_function="sigmoid",
        moe_ffn_hidden_size=settings["intermediate_size"],
        moe_shared_expert_intermediate_size=settings["intermediate_size"],
        moe_layer_freq=[int(layer in moe) for layer in layers],
        moe_apply_probs_on_input=True,
    )
    return replace(
        architecture,
        layers=_layers(config, settings),
        output_bias=bias,
        qk_norm="l2" if settings["use_qk_norm"] else "head",
        query_growth=(settings["attn_scale"], settings["floor_scale"]) if settings["attn_temperature_tuning"] else None,
        routing=Routing(normalize=False),
        carried=r"(vision_model|multi_modal_projector)\.",
    )


def _layers(config: dict[str, Any], settings: dict[str, Any]) -> tuple[Layer, ...]:
    number, interval = settings["num_hidden_layers"], settings["no_rope_layer_interval"]
    turning = settings["no_rope_layers"] or [int((layer + 1) % interval != 0) for layer in range(number)]
    kinds = config.get("layer_types") or [
        "chunked_attention" if turns else "full_attention" for turns in turning[:number]
    ]
    if len(kinds) != number or set(kinds) - {"chunked_attention", "full_attention"}:
        raise ValueError(
            f"config.json has layer_types {kinds}: there must be one for each of the {number} layers, "
            "chunked_attention or full_attention"
        )
    chunk = config.get("attention_chunk_size", 8192)
    if chunk is None and "chunked_attention" in kinds:
        raise ValueError("config.json has attention_chunk_size null, and layers of type chunked_attention")
    return tuple(
        Layer(rope=0 if turns else None, chunk=chunk if kind == "chunked_attention" else None)
        for kind, turns in zip(kinds, turning, strict=False)
    )


def moe_layers(settings: dict[str, Any]) -> tuple[int, ...]:
    step = settings["interleave_moe_layer_step"]
    every = range(step - 1, settings["num_hidden_layers"], step)
    return tuple(every if settings["moe_layers"] is None else settings["moe_layers"])


def rows(config: dict[str, Any]) -> list[Row]:
    return spelled(config, _alone(text_config(config)), outer)


def _alone(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    moe = moe_layers(settings)
    dense = dense_layers(settings, moe)
    hf, mcore = HF_LAYER + "feed_forward.", LAYER + "mlp."
    return [
        *ENDS,
        *ATTENTION,
        *attention_biases(config),
        Row(hf + "{part}_proj.weight", mcore + "linear_fc1.weight", GATE_UP, dense),
        Row(hf + "down_proj.weight", mcore + "linear_fc2.weight", ROW, dense),
        Row(hf + "router.weight", mcore + "router.weight", REPLICATED, moe),
        Row(hf + "shared_expert.{part}_proj.weight", mcore + "shared_experts.linear_fc1.weight", GATE_UP, moe),
        Row(hf + "shared_expert.down_proj.weight", mcore + "shared_experts.linear_fc2.weight", ROW, moe),
        Row(
            hf + "experts.gate_up_proj",
            mcore + "experts.linear_fc1.weight",
            FUSED_GATE_UP,
            moe,
            stacked=True,
            transposed=True,
        ),
        Row(hf + "experts.down_proj", mcore + "experts.linear_fc2.weight", ROW, moe, stacked=True, transposed=True),
    ]


FAMILY = Family(
    name="llama4_text",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    models="Llama 4 Scout and Maverick, text",
    describe=describe,
    rows=rows,
    limits=("images: the vision tower is carried along unchanged",),
)
