"""DeepSeek-V2: multi-latent attention, dense first layers, softmax routing."""

import math
from dataclasses import replace
from typing import Any

from ..mapping.architecture import Architecture, HfConfig, Routing, TransformerArgs
from ..mapping.param_mapping import COLUMN, REPLICATED, ROW, Family, ParamMapping
from .decoder import DEFAULTS, ENDS, NORMS, check_supported, describe_decoder, layer_mapping
from .deepseek_moe import feed_forward, group_arguments, moe_arguments

# transformers' class supports only these values, and ignores config.json.
SUPPORTED = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
    "moe_layer_freq": (1,),
    "norm_topk_prob": (False,),
    "mlp_bias": (False,),
}
Q_LORA_RANK = 1536  # where config.json has no q_lora_rank; null means a plain projection


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, SUPPORTED)
    if config["num_experts_per_tok"] is None:
        raise ValueError("config.json has no num_experts_per_tok: how many experts a token visits")
    groups = group_arguments(config) if config["topk_method"] == "group_limited_greedy" else {}
    scores = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
    rule = Routing(group_members=1, normalize=False) if groups else None
    return describe_latent(config, moe_arguments(config) | groups | scores, interleaved=True, routing=rule)


def describe_latent(
    config: HfConfig, transformer: TransformerArgs, *, interleaved: bool, **fields: Any
) -> Architecture:
    """Return the architecture of a decoder with multi-latent attention. Arguments as in `describe_decoder`."""
    heads = config["num_attention_heads"]
    check_supported(config, {"attention_bias": (False,)})
    if config["num_key_value_heads"] not in (None, heads):
        raise ValueError(
            f"config.json has num_key_value_heads {config['num_key_value_heads']} and num_attention_heads {heads}: "
            "multi-latent attention has a key and a value for each query head"
        )
    rope_dim = config["qk_rope_head_dim"]
    head_dim = config["qk_nope_head_dim"] + rope_dim
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": config.get("q_lora_rank", Q_LORA_RANK),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": rope_dim,
        "v_head_dim": config["v_head_dim"],
    }
    config = config | {"num_key_value_heads": heads, "head_dim": head_dim}
    architecture = describe_decoder(config, latent | transformer, interleaved=interleaved, **fields)
    (rope,) = architecture.ropes
    scale = head_dim**-0.5 * _yarn_factor(rope.scaling) ** 2
    return replace(
        architecture,
        transformer=architecture.transformer | {"softmax_scale": scale},
        ropes=(replace(rope, dim=rope_dim),),
    )


def _yarn_factor(scaling: HfConfig | None) -> float:
    """Return YaRN's factor on all dimensions of queries and keys (mscale_all_dim)."""
    amount = (scaling or {}).get("mscale_all_dim")
    factor = (scaling or {}).get("factor", 1.0)
    return 1.0 if not amount or factor <= 1 else 0.1 * amount * math.log(factor) + 1.0


def latent_attention(config: HfConfig) -> list[ParamMapping]:
    """Map multi-latent attention and the norms of the layer."""
    hf, mcore = "self_attn.", "self_attention."
    queries = [layer_mapping(hf + "q_proj.weight", mcore + "linear_q_proj.weight", COLUMN)]
    if config.get("q_lora_rank", Q_LORA_RANK) is not None:
        queries = [
            layer_mapping(hf + "q_a_proj.weight", mcore + "linear_q_down_proj.weight", REPLICATED),
            layer_mapping(hf + "q_a_layernorm.weight", mcore + "q_layernorm.weight", REPLICATED),
            layer_mapping(hf + "q_b_proj.weight", mcore + "linear_q_up_proj.weight", COLUMN),
        ]
    return [
        *NORMS,
        *queries,
        layer_mapping(hf + "kv_a_proj_with_mqa.weight", mcore + "linear_kv_down_proj.weight", REPLICATED),
        layer_mapping(hf + "kv_a_layernorm.weight", mcore + "kv_layernorm.weight", REPLICATED),
        layer_mapping(hf + "kv_b_proj.weight", mcore + "linear_kv_up_proj.weight", COLUMN),
        layer_mapping(hf + "o_proj.weight", mcore + "linear_proj.weight", ROW),
    ]


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + latent_attention(config) + feed_forward(config, bias=False)


FAMILY = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    models="DeepSeek-V2, V2-Lite, V2.5, Coder-V2",
    architecture=architecture,
    mappings=mappings,
    limits=(
        "attention_bias and mlp_bias",
        "norm_topk_prob true (transformers' class ignores it)",
        "topk_method other than greedy and group_limited_greedy",
    ),
    defaults=DEFAULTS
    | {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "num_experts_per_tok": None,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
)
