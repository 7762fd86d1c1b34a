"""Granite 4: Mamba-2 layers and attention by turns, a shared MLP, with or without experts, and Granite's factors."""

from dataclasses import replace
from typing import Any

from ..mapping.architecture import Architecture, HfConfig, Layer, Mamba
from ..mapping.param_mapping import FUSED_GATE_UP, ROW, Family, ParamMapping
from . import granite, granitemoe, granitemoeshared, mamba_hybrid
from .decoder import (
    ENDS,
    NORMS,
    PROJECTIONS,
    attention_biases,
    check_layer_types,
    check_supported,
    layer_mapping,
)
from .softmax_moe import softmax_routing

MIXERS = {"linear_attention": "mamba", "full_attention": "attention"}
OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
SUPPORTED = {
    "hidden_act": ("silu", "swish"),
    "mamba_n_groups": (1,),
    "mamba_proj_bias": (False,),
    "mlp_bias": (False,),
    "position_embedding_type": ("rope", "nope"),
}


def _layer_types(config: HfConfig) -> list[str]:
    default = ["linear_attention"] * config["num_hidden_layers"]
    named: list[str] = config.get("layer_types") or config.get("layers_block_type") or default
    types = [OLDER_NAMES.get(kind, kind) for kind in named]
    check_layer_types(config, types, set(MIXERS))
    return types


def _read_mamba(config: HfConfig) -> Mamba:
    return mamba_hybrid.read_mamba(config, config["mamba_expand"] * config["hidden_size"])


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, SUPPORTED)
    rope = 0 if config.get("position_embedding_type") == "rope" else None
    layers = tuple(
        Layer(MIXERS[kind], rope=rope if kind == "full_attention" else None) for kind in _layer_types(config)
    )
    fields: dict[str, Any] = {"layers": layers} | ({"ropes": ()} if rope is None else {})
    if any(layer.mixer == "mamba" for layer in layers):
        fields["mamba"] = _read_mamba(config)
    width = config["shared_intermediate_size"]
    if not config["num_local_experts"]:
        return granite.architecture(config | {"intermediate_size": width}, **fields)
    routing, rule = softmax_routing(config["num_local_experts"], config["num_experts_per_tok"], normalize=True)
    experts = {"moe_ffn_hidden_size": config["intermediate_size"], "moe_shared_expert_intermediate_size": width}
    return granite.architecture(config, experts | routing, routing=rule, module_names=granitemoe.MODULES, **fields)


def mappings(config: HfConfig) -> list[ParamMapping]:
    mamba, full = (tuple(layer for layer, each in enumerate(_layer_types(config)) if each == kind) for kind in MIXERS)
    attention = [replace(mapping, layers=full) for mapping in PROJECTIONS + attention_biases(config)]
    mixers = [
        layer_mapping("mamba." + name, "self_attention." + name, kind, mamba)
        for name, kind in (mamba_hybrid.mamba_kinds(_read_mamba(config)) if mamba else ())
    ]
    feed_forward = granitemoe.EXPERTS + granitemoeshared.SHARED
    if not config["num_local_experts"]:
        feed_forward = [
            layer_mapping("shared_mlp.input_linear.weight", "mlp.linear_fc1.weight", FUSED_GATE_UP),
            layer_mapping("shared_mlp.output_linear.weight", "mlp.linear_fc2.weight", ROW),
        ]
    return ENDS + NORMS + attention + mixers + feed_forward


FAMILY = Family(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    models="Granite 4.0 (Micro, H-Micro, H-Tiny, H-Small, and 350M to 1B)",
    architecture=architecture,
    mappings=mappings,
    limits=(
        "mamba_n_groups other than 1, which transformers' kernels and its class norm differently",
        "mamba_proj_bias",
    ),
    defaults=granitemoe.FAMILY.defaults | mamba_hybrid.DEFAULTS | {"shared_intermediate_size": 1024},
)
