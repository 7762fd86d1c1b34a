"""MiniMax-M2: norms over all query and over all key heads, of which a part turns; experts behind a sigmoid router."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import REPLICATED, Architecture, Family, Routing, Row
from .decoder import ATTENTION, ENDS, HF_LAYER, LAYER, QK_NORMS, check_known, describe_decoder, with_defaults
from .mixtral import refuse_jitter
from .softmax_moe import block_sparse_moe

# transformers' MiniMaxM2Config
DEFAULTS = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 5e6,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
# What MiniMax's own configs say, and the one value that the checkpoints have.
KNOWN = {
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    refuse_jitter(config)
    check_known(config, KNOWN)
    if not all(config.get("attn_type_list") or ()):
        raise ValueError("config.json has attn_type_list with layers of linear attention: MiniMax-M2 has none")
    if config.get("shared_intermediate_size") or config.get("sliding_window"):
        raise ValueError("config.json has shared_intermediate_size or sliding_window: MiniMax-M2 has neither")
    turning = config["rotary_dim"] / settings["head_dim"] if config.get("rotary_dim") else 1.0
    return replace(
        describe_decoder(
            config,
            settings | {"partial_rotary_factor": turning},
            qk_layernorm=True,
            num_moe_experts=settings["num_local_experts"],
            moe_router_topk=settings["num_experts_per_tok"],
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_ffn_hidden_size=settings["intermediate_size"],
        ),
        routing=Routing(fp32=True),
        qk_norm="all",
        carried=_predicting(config, settings["num_hidden_layers"]),
    )


def _predicting(config: dict[str, Any], layers: int) -> str:
    """A pattern of the names of the modules that predict further tokens, where a checkpoint has them."""
    numbers = "|".join(str(layers + number) for number in range(config.get("num_mtp_modules") or 0))
    return rf"model\.layers\.(?:{numbers})\." if numbers else ""


def rows(config: dict[str, Any]) -> list[Row]:
    bias = Row(
        HF_LAYER + "block_sparse_moe.e_score_correction_bias", LAYER + "mlp.router.expert_bias", REPLICATED, fp32=True
    )
    return ENDS + ATTENTION + QK_NORMS + block_sparse_moe(fp32=True) + [bias]


FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    models="MiniMax-M2, M2.1",
    describe=describe,
    rows=rows,
    limits=("router_jitter_noise",),
)
