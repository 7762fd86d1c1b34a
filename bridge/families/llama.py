"""Llama: 3.1 and later versions scale their rotary embeddings."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from . import llava
from .decoder import ATTENTION, DEFAULTS, ENDS, attention_biases, describe_decoder, mlp, mlp_biases


def architecture(config: HfConfig) -> Architecture:
    bias = config["attention_bias"]
    return describe_decoder(config, {"add_qkv_bias": bias}, output_bias=bias, mlp_bias=config["mlp_bias"])


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + attention_biases(config) + mlp() + mlp_biases(config)


FAMILY = llava.with_tower(
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        models="Llama 2, 3, 3.1, 3.2 (text), 3.3, R1-Distill-Llama, and models of its shape such as SmolLM2; LLaVA 1.5",
        architecture=architecture,
        mappings=mappings,
        defaults=DEFAULTS
        | {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    )
)
