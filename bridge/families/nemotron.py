"""Nemotron-4 and Minitron: LayerNorms around 1, MLPs of a squared ReLU without a gate, and a rope on half a head."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .arcee import PLAIN_MLP, PLAIN_MLP_BIASES
from .decoder import ATTENTION, DEFAULTS, ENDS, NORM_BIASES, attention_biases, describe_decoder


def architecture(config: HfConfig) -> Architecture:
    bias = config["attention_bias"]
    transformer = {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
        "add_qkv_bias": bias,
        "gated_linear_unit": False,
    }
    config = config | {"rms_norm_eps": config["norm_eps"]}
    return describe_decoder(config, transformer, partial_rotary=True, output_bias=bias, mlp_bias=config["mlp_bias"])


def mappings(config: HfConfig) -> list[ParamMapping]:
    biases = attention_biases(config) + (PLAIN_MLP_BIASES if config["mlp_bias"] else [])
    return ENDS + ATTENTION + NORM_BIASES + PLAIN_MLP + biases


FAMILY = Family(
    name="nemotron",
    architectures=("NemotronForCausalLM",),
    models="Nemotron-4, Minitron 4B and 8B, Nemotron-Mini 4B",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
)
