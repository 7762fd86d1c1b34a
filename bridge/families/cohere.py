"""Command R and Aya: attention and MLP beside each other behind one LayerNorm without bias, and scaled logits."""

from typing import Any

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import REPLICATED, Family, ParamMapping
from .decoder import (
    DEFAULTS,
    ENDS,
    PROJECTIONS,
    attention_biases,
    check_supported,
    describe_decoder,
    layer_mapping,
    mlp,
)

# Keys of Cohere's configs, with the only value that transformers' class implements or that is supported here.
SUPPORTED = {"use_parallel_block": (True,), "use_gated_activation": (True,), "use_qk_norm": (False,)}


def architecture(config: HfConfig, **fields: Any) -> Architecture:
    """Return the architecture. fields: additional arguments of Architecture."""
    check_supported(config, SUPPORTED)
    bias = config["attention_bias"]
    return describe_decoder(
        config | {"rms_norm_eps": config["layer_norm_eps"]},
        {"add_qkv_bias": bias, "normalization": "LayerNorm"},
        interleaved=True,
        logits_scale=1.0 / config["logit_scale"],
        norm_bias=False,
        output_bias=bias,
        parallel_block=True,
        **fields,
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    norm = layer_mapping("input_layernorm.weight", "input_layernorm.weight", REPLICATED)
    return [*ENDS, norm, *PROJECTIONS, *attention_biases(config), *mlp()]


COHERE_DEFAULTS = DEFAULTS | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}

FAMILY = Family(
    name="cohere",
    architectures=("CohereForCausalLM",),
    models="Command R (35B), Aya 23 and Aya Expanse",
    architecture=architecture,
    mappings=mappings,
    limits=("use_qk_norm (Command R+)",),
    defaults=COHERE_DEFAULTS | {"rope_theta": 500000.0},
)
