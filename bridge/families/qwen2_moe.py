"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, experts, and a shared expert with a sigmoid gate."""

from ..mapping.architecture import Architecture, HfConfig, Routing, TransformerArgs
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import (
    ATTENTION,
    DEFAULTS,
    ENDS,
    QKV_BIAS,
    dense_layers,
    describe_decoder,
    experts,
    mlp,
    shared_experts,
    sliding_layers,
)
from .qwen3_moe import moe_layers
from .softmax_moe import softmax_routing


def architecture(config: HfConfig) -> Architecture:
    moe, rule = gated_routing(config, moe_layers(config))
    # With use_sliding_window, even layers below max_window_layers have a window.
    has_windows, last = config.get("use_sliding_window"), config.get("max_window_layers", 28)
    is_sliding = [bool(has_windows) and i % 2 == 0 and i < last for i in range(config["num_hidden_layers"])]
    layers = sliding_layers(config if has_windows else config | {"sliding_window": None}, is_sliding)
    return describe_decoder(config, {"add_qkv_bias": config["qkv_bias"]} | moe, routing=rule, layers=layers)


def gated_routing(config: HfConfig, moe: tuple[int, ...]) -> tuple[TransformerArgs, Routing | None]:
    """Return the settings of layers `moe` with experts and a shared expert, and a `Routing` as `softmax_routing`."""
    normalize = config["norm_topk_prob"]
    routing, rule = softmax_routing(config["num_experts"], config["num_experts_per_tok"], normalize=normalize)
    return routing | {
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "moe_layer_freq": [int(layer in moe) for layer in range(config["num_hidden_layers"])],
    }, rule


def gated_experts(moe: tuple[int, ...]) -> list[ParamMapping]:
    """Map experts and a gated shared expert."""
    return experts(moe) + shared_experts("mlp.shared_expert", moe, gate=True)


def mappings(config: HfConfig) -> list[ParamMapping]:
    moe = moe_layers(config)
    biases = QKV_BIAS if config["qkv_bias"] else []
    return ENDS + ATTENTION + biases + mlp(dense_layers(config, moe)) + gated_experts(moe)


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "qkv_bias": True,
    },
)
