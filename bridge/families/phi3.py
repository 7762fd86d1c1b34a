"""Phi-3 and Phi-4: query, key and value in one matrix, gate and up in another; LongRoPE, on a part of heads in Phi-4.

Under LongRoPE a document turns by the factors for its own length: by the long ones where it is longer than the original
length. transformers does the same for a document by itself; in a padded batch it goes by the longest row.
"""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import ROW, Architecture, Family, Kind, Layer, Row, Span
from .decoder import ENDS, FUSED_MLP, HF_LAYER, LAYER, NORMS, check_known, describe_decoder, with_defaults

# transformers' Phi3Config
DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 1.0,
}


def describe(config: dict[str, Any]) -> Architecture:
    settings = with_defaults(config, DEFAULTS)
    check_known(config, {"attention_bias": (False,), "mlp_bias": (False,)})
    config = config | {"original_max_position_embeddings": settings["original_max_position_embeddings"]}
    for key in ("rope_parameters", "rope_scaling"):
        given = dict(config.get(key) or {})
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        if kind not in ("default", "longrope", "su", "yarn"):
            raise ValueError(f"config.json has {key} of type {kind!r}; Phi-3 is known with default and longrope")
        # Older files have two other names for LongRoPE.
        config[key] = given | {"rope_type": "default" if kind == "default" else "longrope"} if given else None
    layers = (Layer(window=config.get("sliding_window")),) * settings["num_hidden_layers"]
    return replace(describe_decoder(config, settings), layers=layers)


def _query_key_value(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """For each query group its query heads, its key head, its value head, of one matrix with all queries first."""
    heads, groups = architecture.transformer["num_attention_heads"], architecture.transformer["num_query_groups"]
    one = length // (heads + 2 * groups)
    sizes = (heads // groups * one, one, one)
    starts = (0, heads * one, (heads + groups) * one)
    return [
        Span(0, start + g * size, start + (g + 1) * size)
        for g in range(groups)
        for start, size in zip(starts, sizes, strict=True)
    ]


FUSED_QKV = Kind(0, _query_key_value)


def rows(config: dict[str, Any]) -> list[Row]:
    return [
        *ENDS,
        *NORMS,
        Row(HF_LAYER + "self_attn.qkv_proj.weight", LAYER + "self_attention.linear_qkv.weight", FUSED_QKV),
        Row(HF_LAYER + "self_attn.o_proj.weight", LAYER + "self_attention.linear_proj.weight", ROW),
        *FUSED_MLP,
    ]


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    models="Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4-mini, Phi-4-reasoning",
    describe=describe,
    rows=rows,
    limits=("attention_bias and mlp_bias (transformers' class has none)", "rope scaling other than longrope"),
)
