"""OLMo 2: norms on the outputs of attention and MLP, none on their inputs, and norms over all query and key heads."""

from typing import Any

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import DEFAULTS, ENDS, POST_NORMS, PROJECTIONS, QK_NORMS, attention_biases, describe_decoder, mlp


def architecture(config: HfConfig, **fields: Any) -> Architecture:
    """Return the architecture. fields: additional arguments of Architecture."""
    bias = config["attention_bias"]
    attention = {"add_qkv_bias": bias, "qk_layernorm": True}
    return describe_decoder(
        config, attention, output_bias=bias, qk_norm="all", pre_norms=False, post_norms=True, **fields
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + POST_NORMS + PROJECTIONS + attention_biases(config) + QK_NORMS + mlp()


OLMO_DEFAULTS = DEFAULTS | {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}

FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    models="OLMo 2",
    architecture=architecture,
    mappings=mappings,
    defaults=OLMO_DEFAULTS,
)
