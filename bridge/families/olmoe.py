"""OLMoE: norms over all query heads and over all key heads, and experts with softmax routing in every layer."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, QK_NORMS, attention_biases, check_supported, describe_decoder, experts
from .softmax_moe import softmax_routing


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"clip_qkv": (False,)})
    bias, normalize = config["attention_bias"], config["norm_topk_prob"]
    routing, rule = softmax_routing(config["num_experts"], config["num_experts_per_tok"], normalize=normalize)
    attention = {"add_qkv_bias": bias, "qk_layernorm": True}
    transformer = attention | {"moe_ffn_hidden_size": config["intermediate_size"]} | routing
    return describe_decoder(config, transformer, routing=rule, output_bias=bias, qk_norm="all")


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + attention_biases(config) + QK_NORMS + experts()


FAMILY = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    models="OLMoE-1B-7B",
    architecture=architecture,
    mappings=mappings,
    limits=("clip_qkv",),
    defaults=DEFAULTS
    | {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
)
