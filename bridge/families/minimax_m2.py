"""MiniMax-M2: norms over all query and over all key heads, partial rotary embeddings, sigmoid routing."""

from ..mapping.architecture import Architecture, HfConfig, Routing
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, QK_NORMS, check_supported, describe_decoder
from .deepseek_moe import mtp_pattern, score_bias
from .mixtral import check_jitter
from .softmax_moe import block_sparse_moe

# Keys of MiniMax's configs, with the only value in its checkpoints.
SUPPORTED = {
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
}


def architecture(config: HfConfig) -> Architecture:
    check_jitter(config)
    check_supported(config, SUPPORTED)
    if not all(config.get("attn_type_list") or ()):
        raise ValueError("config.json has attn_type_list with layers of linear attention: MiniMax-M2 has none")
    if config.get("shared_intermediate_size") or config.get("sliding_window"):
        raise ValueError("config.json has shared_intermediate_size or sliding_window: MiniMax-M2 has neither")
    rotated = config["rotary_dim"] / config["head_dim"] if config.get("rotary_dim") else 1.0
    transformer = {
        "qk_layernorm": True,
        "num_moe_experts": config["num_local_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_ffn_hidden_size": config["intermediate_size"],
    }
    return describe_decoder(
        config | {"partial_rotary_factor": config.get("partial_rotary_factor") or rotated},
        transformer,
        partial_rotary=True,
        routing=Routing(fp32=True),
        qk_norm="all",
        passthrough=mtp_pattern(config, config.get("num_mtp_modules") or 0),
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    bias = score_bias("block_sparse_moe.e_score_correction_bias")
    return ENDS + ATTENTION + QK_NORMS + block_sparse_moe(fp32=True) + [bias]


FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    models="MiniMax-M2, M2.1, M2.5, M2.7",
    architecture=architecture,
    mappings=mappings,
    limits=("router_jitter_noise",),
    defaults=DEFAULTS
    | {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5e6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
)
