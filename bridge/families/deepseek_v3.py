"""DeepSeek-V3 and R1: V2's multi-latent attention, group-limited sigmoid routing with a bias."""

from functools import partial

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from . import kimi_vl
from .decoder import DEFAULTS, ENDS
from .deepseek_moe import LIMITS, feed_forward, mtp_mappings, mtp_pattern, sigmoid_routing
from .deepseek_v2 import describe_latent, latent_attention


def architecture(config: HfConfig) -> Architecture:
    routing, rule = sigmoid_routing(config)
    interleaved = config["rope_interleave"]
    return describe_latent(config, routing, interleaved=interleaved, routing=rule, passthrough=mtp_pattern(config))


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + latent_attention(config) + feed_forward(config, bias=True)


FAMILY = kimi_vl.with_tower(
    Family(
        name="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        models="DeepSeek-V3, V3.1 and R1; Moonlight; Kimi-K2 and K2-Thinking; Kimi-VL; Kimi-K2.5 and K2.6",
        architecture=architecture,
        mappings=mappings,
        mtp_mappings=partial(mtp_mappings, mappings),
        limits=("attention_bias", *LIMITS),
        defaults=DEFAULTS
        | {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 4096,
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
        },
    )
)
