"""GLM-4.5 and 4.6: grouped-query attention with rotary embeddings on half of each head, and DeepSeek-V3's experts."""

from functools import partial

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, QK_NORMS, QKV_BIAS, describe_decoder
from .deepseek_moe import LIMITS, feed_forward, mtp_mappings, mtp_pattern, sigmoid_routing


def architecture(config: HfConfig) -> Architecture:
    routing, rule = sigmoid_routing(config)
    # The output projection has no bias.
    transformer = {"add_qkv_bias": config["attention_bias"], "qk_layernorm": config["use_qk_norm"]} | routing
    return describe_decoder(config, transformer, partial_rotary=True, routing=rule, passthrough=mtp_pattern(config))


def mappings(config: HfConfig) -> list[ParamMapping]:
    biases = QKV_BIAS if config["attention_bias"] else []
    norms = QK_NORMS if config["use_qk_norm"] else []
    return ENDS + ATTENTION + biases + norms + feed_forward(config, bias=True)


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    architecture=architecture,
    mappings=mappings,
    mtp_mappings=partial(mtp_mappings, mappings),
    limits=LIMITS,
    defaults=DEFAULTS
    | {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
    },
)
