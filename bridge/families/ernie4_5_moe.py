"""ERNIE 4.5 with experts: shared experts, and softmax routing with a bias on the choice."""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Routing
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import (
    ATTENTION,
    DEFAULTS,
    ENDS,
    check_supported,
    dense_layers,
    describe_decoder,
    experts,
    mlp,
    shared_experts,
)
from .deepseek_moe import score_bias

# Keys of Baidu's configs, with the only value that transformers' class implements.
SUPPORTED = {"moe_gate_act": ("softmax",), "moe_use_aux_free": (True,)}


def architecture(config: HfConfig) -> Architecture:
    if config.get("use_bias"):
        raise ValueError(
            "config.json has use_bias true: megatron-core's shared experts have no biases. No released ERNIE 4.5 has it"
        )
    check_supported(config, SUPPORTED)
    moe, shared = _moe_layers(config), config["moe_num_shared_experts"] * config["moe_intermediate_size"]
    transformer = {
        "num_moe_experts": config["moe_num_experts"],
        "moe_router_topk": config["moe_k"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_layer_freq": [int(layer in moe) for layer in range(config["num_hidden_layers"])],
    }
    routing = Routing(smallest_sum=config["moe_norm_min"], choice_bias=True, fp32=True)
    return describe_decoder(config, transformer, interleaved=True, routing=routing, passthrough=r"model\.mtp_")


def _moe_layers(config: HfConfig) -> tuple[int, ...]:
    last, end = config["num_hidden_layers"] - 1, config["moe_layer_end_index"]
    layers = range(config["moe_layer_start_index"], (last if end == -1 else min(last, end)) + 1)
    return tuple(layer for layer in layers if (layer + 1) % config["moe_layer_interval"] == 0)


def mappings(config: HfConfig) -> list[ParamMapping]:
    moe = _moe_layers(config)
    router, *others = experts(moe)
    routed = [replace(router, fp32=True), score_bias("mlp.moe_statics.e_score_correction_bias", moe), *others]
    shared = shared_experts("mlp.shared_experts", moe) if config["moe_num_shared_experts"] else []
    return ENDS + ATTENTION + mlp(dense_layers(config, moe)) + routed + shared


FAMILY = Family(
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM",),
    models="ERNIE 4.5 21B-A3B, 300B-A47B (text)",
    architecture=architecture,
    mappings=mappings,
    limits=("use_bias",),
    defaults=DEFAULTS
    | {
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
)
