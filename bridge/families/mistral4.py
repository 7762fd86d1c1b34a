"""Mistral Small 4: DeepSeek's latent attention with queries that grow with their position, and softmax routing.

Checkpoints on the hub are Mistral3ForConditionalGeneration, whose tower is carried.
"""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Routing
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import DEFAULTS, ENDS, fill_rope
from .deepseek_moe import feed_forward, group_arguments, moe_arguments, moe_layers
from .deepseek_v2 import describe_latent, latent_attention
from .ministral3 import ROPE as MINISTRAL_ROPE
from .ministral3 import query_growth
from .mistral import ARCHITECTURES, VLM_NAMES
from .qwen3_5_moe_text import STACKED
from .vlm_text import NESTED_MODULES, TOWER_AND_PROJECTOR, nested_text_config

Q_LORA_RANK = 1024  # where config.json has no q_lora_rank; null means a plain projection
ROPE = MINISTRAL_ROPE | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}


def architecture(config: HfConfig) -> Architecture:
    config = {"q_lora_rank": Q_LORA_RANK} | fill_rope(config, ROPE)
    growth = query_growth(config)
    rope_share = config["qk_rope_head_dim"] / (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    for key in ("rope_parameters", "rope_scaling"):
        rope = dict(config.get(key) or {})
        share = rope.pop("partial_rotary_factor", None)
        if share not in (None, rope_share):
            raise ValueError(
                f"config.json has partial_rotary_factor {share} in its {key}: of a head, qk_rope_head_dim turns, a "
                f"share of {rope_share}"
            )
        config = config | {key: rope or None}
    transformer = {
        **moe_arguments(config),
        **group_arguments(config),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
    }
    return describe_latent(
        config,
        transformer,
        interleaved=config["rope_interleave"],
        routing=Routing(group_members=2, normalize=bool(config["norm_topk_prob"])),
        query_growth=growth,
        passthrough=TOWER_AND_PROJECTOR,
        module_names=NESTED_MODULES,
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    config, moe = {"q_lora_rank": Q_LORA_RANK} | config, tuple(moe_layers(config))
    stacked = [replace(mapping, layers=moe) for mapping in STACKED]
    return ENDS + latent_attention(config) + feed_forward(config, bias=False) + stacked


FAMILY = Family(
    name="mistral4",
    architectures=("Mistral4ForCausalLM", *ARCHITECTURES),
    models="Mistral Small 4 (text)",
    architecture=architecture,
    mappings=mappings,
    text_config=nested_text_config,
    vlm_names=VLM_NAMES,
    limits=("attention_bias", "images: the tower is carried"),
    defaults=DEFAULTS
    | {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 1048576,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "first_k_dense_replace": 0,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
)
