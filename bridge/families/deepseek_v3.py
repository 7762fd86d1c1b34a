"""DeepSeek-V3 and R1: V2's multi-latent attention, experts chosen by groups from sigmoid scores with a bias."""

from dataclasses import replace
from functools import partial
from typing import Any

from ..mapping.param_mapping import Architecture, Family, Row
from .decoder import ENDS, with_defaults
from .deepseek_moe import feed_forward, predicting_layers, predicting_rows, sigmoid_routing
from .deepseek_v2 import describe_latent, latent_attention

# transformers' DeepseekV3Config
DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
Q_LORA_RANK = 1536


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    routing, rule = sigmoid_routing(config, settings)
    settings["rope_interleaved"] = settings["rope_interleave"]
    architecture = describe_latent(config, settings, Q_LORA_RANK, **routing)
    return replace(architecture, routing=rule, carried=predicting_layers(config, settings))


def rows(config: dict[str, Any]) -> list[Row]:
    settings = with_defaults(config, DEFAULTS)
    return ENDS + latent_attention(config, Q_LORA_RANK) + feed_forward(settings, bias=True)


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    models="DeepSeek-V3, V3.1 and R1; Moonlight; Kimi-K2",
    describe=describe,
    rows=rows,
    predicting_rows=partial(predicting_rows, rows, DEFAULTS["num_hidden_layers"]),
    limits=("attention_bias", "scoring_func other than sigmoid", "topk_method other than noaux_tc"),
)
