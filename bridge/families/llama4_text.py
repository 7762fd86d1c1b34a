"""Llama 4 text: three of four layers have chunked attention and a rope, the fourth neither.

In layers with a rope, queries and keys are divided by their root mean square after it. In the others, queries are
scaled up with their position. A token has one routed expert, whose input is weighted by a sigmoid, and a shared expert.
Checkpoints on the hub are Llama4ForConditionalGeneration, whose tower is in llama4_vision.py.
"""

from functools import partial

from ..mapping.architecture import Architecture, HfConfig, Layer, QueryGrowth, Routing
from ..mapping.param_mapping import FUSED_GATE_UP, GATE_UP, REPLICATED, ROW, Family, ParamMapping
from .decoder import (
    ATTENTION,
    DEFAULTS,
    ENDS,
    attention_biases,
    check_layer_types,
    dense_layers,
    describe_decoder,
    layer_mapping,
    mlp,
)
from .llama4_vision import LIMITS, vision, vision_mappings
from .vlm_text import nest_in_language_model, text_config


def architecture(config: HfConfig) -> Architecture:
    bias, moe = config["attention_bias"], moe_layers(config)
    growth = QueryGrowth(config["attn_scale"], config["floor_scale"], first=1, has_rope=False)
    return describe_decoder(
        config | {"intermediate_size": config["intermediate_size_mlp"]},
        {
            "add_qkv_bias": bias,
            "num_moe_experts": config["num_local_experts"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_score_function": "sigmoid",
            "moe_ffn_hidden_size": config["intermediate_size"],
            "moe_shared_expert_intermediate_size": config["intermediate_size"],
            "moe_layer_freq": [int(layer in moe) for layer in range(config["num_hidden_layers"])],
            "moe_apply_probs_on_input": True,
        },
        interleaved=True,
        layers=_layers(config),
        output_bias=bias,
        qk_norm="l2" if config["use_qk_norm"] else "head",
        query_growth=growth if config["attn_temperature_tuning"] else None,
        routing=Routing(normalize=False),
        passthrough=r"(vision_model|multi_modal_projector)\.",
    )


def _layers(config: HfConfig) -> tuple[Layer, ...]:
    num_layers, interval = config["num_hidden_layers"], config["no_rope_layer_interval"]
    has_rope = config["no_rope_layers"] or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    types = ["chunked_attention" if rope else "full_attention" for rope in has_rope[:num_layers]]
    types = config.get("layer_types") or types
    check_layer_types(config, types, {"chunked_attention", "full_attention"})
    chunk = config.get("attention_chunk_size", 8192)
    if chunk is None and "chunked_attention" in types:
        raise ValueError("config.json has attention_chunk_size null, and layers of type chunked_attention")
    return tuple(
        Layer(rope=0 if rope else None, chunk=chunk if kind == "chunked_attention" else None)
        for kind, rope in zip(types, has_rope, strict=False)
    )


def moe_layers(config: HfConfig) -> tuple[int, ...]:
    step, layers = config["interleave_moe_layer_step"], config["moe_layers"]
    return tuple(range(step - 1, config["num_hidden_layers"], step) if layers is None else layers)


def mappings(config: HfConfig) -> list[ParamMapping]:
    moe = moe_layers(config)
    hf, fc1, fc2 = "feed_forward.", "linear_fc1.weight", "linear_fc2.weight"
    shared, experts = "mlp.shared_experts.", "mlp.experts."
    stacked = {"stacked": True, "transposed": True}
    return [
        *ENDS,
        *ATTENTION,
        *attention_biases(config),
        *mlp(dense_layers(config, moe), "feed_forward"),
        layer_mapping(hf + "router.weight", "mlp.router.weight", REPLICATED, moe),
        layer_mapping(hf + "shared_expert.{part}_proj.weight", shared + fc1, GATE_UP, moe),
        layer_mapping(hf + "shared_expert.down_proj.weight", shared + fc2, ROW, moe),
        layer_mapping(hf + "experts.gate_up_proj", experts + fc1, FUSED_GATE_UP, moe, **stacked),
        layer_mapping(hf + "experts.down_proj", experts + fc2, ROW, moe, **stacked),
    ]


FAMILY = Family(
    name="llama4_text",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    models="Llama 4 Scout and Maverick",
    architecture=architecture,
    mappings=mappings,
    text_config=partial(text_config, use_inner_tie=True),
    vlm_names=(nest_in_language_model,),
    vision=lambda config: vision(config, FAMILY.defaults),
    vision_mappings=vision_mappings,
    limits=LIMITS,
    defaults=DEFAULTS
    | {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
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
    },
)
