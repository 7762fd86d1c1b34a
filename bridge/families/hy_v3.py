"""Hy3: norms per query and key head, a dense layer first, and DeepSeek-V3's routing under other names."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import REPLICATED, Family, ParamMapping
from .decoder import (
    ATTENTION,
    DEFAULTS,
    ENDS,
    QK_NORMS,
    attention_biases,
    check_supported,
    dense_layers,
    describe_decoder,
    experts,
    fill_rope,
    layer_mapping,
    mlp,
    shared_experts,
)
from .deepseek_moe import count_dense_layers, moe_layers, mtp_pattern, score_bias, sigmoid_routing

ROPE = {"rope_type": "default", "rope_theta": 11158840.0}


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"qk_norm": (True,), "use_cla": (False,), "mlp_bias": (False,)})
    routing, rule = sigmoid_routing(_with_deepseek_keys(config))
    bias = config["attention_bias"]
    return describe_decoder(
        fill_rope(config, ROPE),
        {"qk_layernorm": True, "add_qkv_bias": bias} | routing,
        routing=rule,
        output_bias=bias,
        passthrough=mtp_pattern({"num_mtp_layers": 0} | config),
        module_names=((r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),),
    )


def _with_deepseek_keys(config: HfConfig) -> HfConfig:
    return count_dense_layers(config) | {
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": config["num_shared_experts"],
        "norm_topk_prob": True,
        "routed_scaling_factor": config["router_scaling_factor"],
        "n_group": 1,
        "topk_group": 1,
    }


def mappings(config: HfConfig) -> list[ParamMapping]:
    moe = tuple(moe_layers(count_dense_layers(config)))
    _, *routed = experts(moe)
    return [
        *ENDS,
        *ATTENTION,
        *attention_biases(config),
        *QK_NORMS,
        *mlp(dense_layers(config, moe)),
        layer_mapping("mlp.router.gate.weight", "mlp.router.weight", REPLICATED, moe),
        score_bias("mlp.expert_bias", moe),
        *routed,
        *shared_experts("mlp.shared_mlp", moe),
    ]


FAMILY = Family(
    name="hy_v3",
    architectures=("HYV3ForCausalLM",),
    models="Hy3",
    architecture=architecture,
    mappings=mappings,
    limits=("sparse layers before dense ones", "mlp_bias"),
    defaults=DEFAULTS
    | {
        "vocab_size": 120832,
        "hidden_size": 4096,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
    },
)
