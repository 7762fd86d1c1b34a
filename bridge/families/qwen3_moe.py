"""Qwen3-MoE: Qwen3's attention, and experts with softmax routing in most layers."""

from ..mapping.architecture import Architecture, HfConfig, Layer
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import (
    ATTENTION,
    DEFAULTS,
    ENDS,
    QK_NORMS,
    attention_biases,
    dense_layers,
    describe_decoder,
    experts,
    mlp,
)
from .internvl import with_tower
from .softmax_moe import softmax_routing


def architecture(config: HfConfig) -> Architecture:
    bias, normalize, moe = config["attention_bias"], config["norm_topk_prob"], moe_layers(config)
    total = config.get("num_experts", config.get("num_local_experts", 128))  # transformers 5 writes the second
    routing, rule = softmax_routing(total, config["num_experts_per_tok"], normalize=normalize)
    transformer = {
        "qk_layernorm": True,
        "add_qkv_bias": bias,
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_layer_freq": [int(layer in moe) for layer in range(config["num_hidden_layers"])],
        **routing,
    }
    # transformers has the window in all layers or in none, and ignores layer_types and max_window_layers.
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    layers = (Layer(window=window),) * config["num_hidden_layers"]
    return describe_decoder(config, transformer, routing=rule, output_bias=bias, layers=layers)


def moe_layers(config: HfConfig) -> tuple[int, ...]:
    """List the layers that have experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"]
    return tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def mappings(config: HfConfig) -> list[ParamMapping]:
    moe = moe_layers(config)
    return ENDS + ATTENTION + attention_biases(config) + QK_NORMS + mlp(dense_layers(config, moe)) + experts(moe)


TEXT_FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    models="Qwen3 (MoE: 30B-A3B, 235B-A22B, Coder); InternVL 3.5 (30B-A3B)",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
)
FAMILY = with_tower(TEXT_FAMILY)
