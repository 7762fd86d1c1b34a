"""Phi-3 and Phi-4: fused query, key and value, fused gate and up; LongRoPE, on a part of each head in Phi-4.

With LongRoPE the length of each document selects the short or the long factors. transformers uses the longest row of a
padded batch, which is the same for a single document.
"""

from ..mapping.architecture import Architecture, HfConfig, Layer
from ..mapping.param_mapping import ROW, Family, ParamMapping, ShardingKind, Span
from .decoder import DEFAULTS, ENDS, FUSED_MLP, NORMS, check_supported, describe_decoder, layer_mapping


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"attention_bias": (False,), "mlp_bias": (False,)})
    config = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        settings = dict(config.get(key) or {})
        kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
        if kind not in ("default", "longrope", "su", "yarn"):
            raise ValueError(f"config.json has {key} of type {kind!r}; Phi-3 is supported with default and longrope")
        # Older files have two other names for LongRoPE.
        config[key] = settings | {"rope_type": "default" if kind == "default" else "longrope"} if settings else None
    layers = (Layer(window=config.get("sliding_window")),) * config["num_hidden_layers"]
    return describe_decoder(config, partial_rotary=True, layers=layers)


def _query_key_value(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each query group as its query heads, key head and value head, from one matrix with all queries first."""
    heads, groups = architecture.transformer["num_attention_heads"], architecture.transformer["num_query_groups"]
    head_dim = length // (heads + 2 * groups)
    sizes = (heads // groups * head_dim, head_dim, head_dim)
    starts = (0, heads * head_dim, (heads + groups) * head_dim)
    return [
        Span(0, start + g * size, start + (g + 1) * size)
        for g in range(groups)
        for start, size in zip(starts, sizes, strict=True)
    ]


FUSED_ATTENTION = [
    layer_mapping("self_attn.qkv_proj.weight", "self_attention.linear_qkv.weight", ShardingKind(0, _query_key_value)),
    layer_mapping("self_attn.o_proj.weight", "self_attention.linear_proj.weight", ROW),
]


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + NORMS + FUSED_ATTENTION + FUSED_MLP


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    models="Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4-mini, Phi-4-reasoning",
    architecture=architecture,
    mappings=mappings,
    limits=("attention_bias and mlp_bias (transformers' class has none)", "rope scaling other than longrope"),
    defaults=DEFAULTS
    | {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    },
)
