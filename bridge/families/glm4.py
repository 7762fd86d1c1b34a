"""GLM-4-0414: norms before and after attention and MLP, rotary embeddings on adjacent dimensions of half a head."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import REPLICATED, Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, FUSED_MLP, QKV_BIAS, describe_decoder, layer_mapping

POST_NORMS = [
    layer_mapping("post_self_attn_layernorm.weight", "self_attn_bda.norm.weight", REPLICATED),
    layer_mapping("post_mlp_layernorm.weight", "mlp_bda.norm.weight", REPLICATED),
]


def architecture(config: HfConfig) -> Architecture:
    transformer = {"add_qkv_bias": config["attention_bias"]}
    return describe_decoder(config, transformer, interleaved=True, partial_rotary=True, post_norms=True)


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + (QKV_BIAS if config["attention_bias"] else []) + POST_NORMS + FUSED_MLP


FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    models="GLM-4-0414, GLM-Z1",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,  # of queries, keys and values
        "partial_rotary_factor": 0.5,
    },
)
