"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts."""

from functools import partial

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from . import deepseek_v3
from .decoder import DEFAULTS
from .deepseek_moe import LIMITS, count_dense_layers, mtp_mappings


def architecture(config: HfConfig) -> Architecture:
    return deepseek_v3.architecture(count_dense_layers(config))


def mappings(config: HfConfig) -> list[ParamMapping]:
    return deepseek_v3.mappings(count_dense_layers(config))


FAMILY = Family(
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    models="GLM-4.7-Flash",
    architecture=architecture,
    mappings=mappings,
    mtp_mappings=partial(mtp_mappings, mappings),
    limits=("attention_bias", "sparse layers before dense ones", *LIMITS),
    defaults=DEFAULTS
    | {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rope_interleave": True,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
)
