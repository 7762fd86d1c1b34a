"""DeepSeek-V2: multi-latent attention, dense layers first, then experts chosen by their softmax scores."""

import math
from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import COLUMN, REPLICATED, ROW, Architecture, Family, Routing, Row
from .decoder import ENDS, HF_LAYER, LAYER, NORMS, check_known, describe_decoder, with_defaults
from .deepseek_moe import feed_forward, groups, moe_settings

# transformers' DeepseekV2Config
DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
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
}
# What transformers' class computes, where a config.json may say otherwise.
KNOWN = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
    "moe_layer_freq": (1,),
    "norm_topk_prob": (False,),
    "mlp_bias": (False,),
}
Q_LORA_RANK = 1536  # where config.json does not name q_lora_rank; null means a plain projection


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    check_known(config, KNOWN)
    if settings["num_experts_per_tok"] is None:
        raise ValueError("config.json has no num_experts_per_tok: how many experts a token visits")
    routing, rule = moe_settings(settings), None
    if settings["topk_method"] == "group_limited_greedy":
        routing |= groups(settings)
        if "moe_router_num_groups" in routing:
            rule = Routing(group_members=1, normalize=False)
    routing |= {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}
    architecture = describe_latent(config, settings | {"rope_interleaved": True}, Q_LORA_RANK, **routing)
    return replace(architecture, routing=rule)


def describe_latent(
    config: dict[str, Any], settings: dict[str, Any], q_lora_rank: int, **transformer: Any
) -> Architecture:
    """A decoder with multi-latent attention. `q_lora_rank`: where config.json does not name it."""
    heads = settings["num_attention_heads"]
    check_known(config, {"attention_bias": (False,)})
    if settings["num_key_value_heads"] not in (None, heads):
        raise ValueError(
            f"config.json has num_key_value_heads {settings['num_key_value_heads']} and num_attention_heads {heads}: "
            "multi-latent attention has a key and a value for each query head"
        )
    turning = settings["qk_rope_head_dim"]
    head_dim = settings["qk_nope_head_dim"] + turning
    architecture = describe_decoder(
        config,
        settings | {"num_key_value_heads": heads, "head_dim": head_dim},
        multi_latent_attention=True,
        q_lora_rank=config.get("q_lora_rank", q_lora_rank),
        kv_lora_rank=settings["kv_lora_rank"],
        qk_head_dim=settings["qk_nope_head_dim"],
        qk_pos_emb_head_dim=turning,
        v_head_dim=settings["v_head_dim"],
        **transformer,
    )
    (rope,) = architecture.ropes
    scale = head_dim**-0.5 * _stretch(rope.scaling) ** 2
    return replace(
        architecture,
        transformer=architecture.transformer | {"softmax_scale": scale},
        ropes=(replace(rope, dim=turning),),
    )


def _stretch(scaling: dict[str, Any] | None) -> float:
    """YaRN's factor on queries and on keys beyond that on their turning dimensions (mscale_all_dim)."""
    amount = (scaling or {}).get("mscale_all_dim")
    factor = (scaling or {}).get("factor", 1.0)
    return 1.0 if not amount or factor <= 1 else 0.1 * amount * math.log(factor) + 1.0


def latent_attention(config: dict[str, Any], q_lora_rank: int) -> list[Row]:
    """`q_lora_rank`: where config.json does not name it."""
    hf, mcore = HF_LAYER + "self_attn.", LAYER + "self_attention."
    queries = [Row(hf + "q_proj.weight", mcore + "linear_q_proj.weight", COLUMN)]
    if config.get("q_lora_rank", q_lora_rank) is not None:
        queries = [
            Row(hf + "q_a_proj.weight", mcore + "linear_q_down_proj.weight", REPLICATED),
            Row(hf + "q_a_layernorm.weight", mcore + "q_layernorm.weight", REPLICATED),
            Row(hf + "q_b_proj.weight", mcore + "linear_q_up_proj.weight", COLUMN),
        ]
    return [
        *NORMS,
        *queries,
        Row(hf + "kv_a_proj_with_mqa.weight", mcore + "linear_kv_down_proj.weight", REPLICATED),
        Row(hf + "kv_a_layernorm.weight", mcore + "kv_layernorm.weight", REPLICATED),
        Row(hf + "kv_b_proj.weight", mcore + "linear_kv_up_proj.weight", COLUMN),
        Row(hf + "o_proj.weight", mcore + "linear_proj.weight", ROW),
    ]


def rows(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    return ENDS + latent_attention(config, Q_LORA_RANK) + feed_forward(settings, bias=False)


FAMILY = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    models="DeepSeek-V2, V2-Lite, V2.5, Coder-V2",
    describe=describe,
    rows=rows,
    limits=(
        "attention_bias and mlp_bias",
        "norm_topk_prob true (transformers' class ignores it)",
        "topk_method other than greedy and group_limited_greedy",
    ),
)
