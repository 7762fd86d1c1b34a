"""ERNIE 4.5 (dense): Llama's layers, with rotary embeddings of adjacent dimensions."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, MLP_BIASES, OUTPUT_BIAS, QKV_BIAS, describe_decoder, mlp


def architecture(config: HfConfig) -> Architecture:
    bias = config["use_bias"]
    return describe_decoder(config, {"add_qkv_bias": bias}, interleaved=True, output_bias=bias, mlp_bias=bias)


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + mlp() + (QKV_BIAS + OUTPUT_BIAS + MLP_BIASES if config["use_bias"] else [])


FAMILY = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),  # the second in the first files
    models="ERNIE 4.5 0.3B (the PT files)",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "use_bias": False,
    },
)
