"""Apertus: norms of queries and keys, and MLPs without a gate, of xIELU with two learned numbers per layer."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import REPLICATED, SCALAR, Family, ParamMapping
from .arcee import PLAIN_MLP
from .decoder import (
    DEFAULTS,
    ENDS,
    PROJECTIONS,
    QK_NORMS,
    attention_biases,
    check_supported,
    describe_decoder,
    fill_rope,
    layer_mapping,
)

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
NORMS = [
    layer_mapping("attention_layernorm.weight", "input_layernorm.weight", REPLICATED),
    layer_mapping("feedforward_layernorm.weight", "pre_mlp_layernorm.weight", REPLICATED),
]
XIELU = [
    layer_mapping(f"mlp.act_fn.{name}", f"mlp.activation_func.{name}", kind)
    for name, kind in (("alpha_p", REPLICATED), ("alpha_n", REPLICATED), ("beta", SCALAR), ("eps", SCALAR))
]


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"hidden_act": ("xielu",), "mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)})
    bias = config["attention_bias"]
    settings = {"add_qkv_bias": bias, "qk_layernorm": True, "gated_linear_unit": False}
    return describe_decoder(fill_rope(config, ROPE), settings, output_bias=bias)


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + NORMS + PROJECTIONS + attention_biases(config) + QK_NORMS + PLAIN_MLP + XIELU


FAMILY = Family(
    name="apertus",
    architectures=("ApertusForCausalLM",),
    models="Apertus 8B and 70B",
    architecture=architecture,
    mappings=mappings,
    limits=("hidden_act other than xielu",),
    defaults=DEFAULTS
    | {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
    },
)
