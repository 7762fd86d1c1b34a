"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts."""

from functools import partial

from ..mapping.param_mapping import Architecture, Family, HfConfig, ParamMapping
from . import deepseek_v3
from .decoder import DEFAULTS
from .deepseek_moe import LIMITS, mtp_mappings


def architecture(config: HfConfig) -> Architecture:
    return deepseek_v3.architecture(_with_dense_layers(config))


def mappings(config: HfConfig) -> list[ParamMapping]:
    return deepseek_v3.mappings(_with_dense_layers(config))


def _with_dense_layers(config: HfConfig) -> HfConfig:
    """Return `config` with the number of dense first layers that `mlp_layer_types` has, by default 1.

    Raises ValueError for other orders of layers, and if first_k_dense_replace says otherwise: transformers ignores it.
    """
    layers = config["num_hidden_layers"]
    types = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ValueError(
            f"config.json has mlp_layer_types {types}: this family is supported with dense layers first, then sparse "
            f"ones, {layers} in all"
        )
    if config.get("first_k_dense_replace") not in (None, dense):
        raise ValueError(
            f"config.json has first_k_dense_replace {config['first_k_dense_replace']}, which transformers' Glm4MoeLite "
            f"ignores, and {dense} dense layers in mlp_layer_types (by default 1): make them agree"
        )
    return config | {"first_k_dense_replace": dense}


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
