"""MiniMax-Text-01: lightning attention with softmax attention by turns, and Mixtral's experts.

The residual of each part is the output of the norm before it.
"""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Layer, ResidualFactors
from ..mapping.param_mapping import COLUMN, ROW, Family, ParamMapping, ShardingKind, Span
from .decoder import (
    DEFAULTS,
    ENDS,
    NORMS,
    PROJECTIONS,
    check_layer_types,
    check_supported,
    describe_decoder,
    layer_mapping,
)
from .mixtral import check_jitter
from .softmax_moe import block_sparse_moe, softmax_routing

SUPPORTED = {"hidden_act": ("silu", "swish"), "shared_intermediate_size": (0,)}
MIXERS = {"linear_attention": "lightning_attention", "full_attention": "attention"}


def _layer_types(config: HfConfig) -> list[str]:
    layers = range(config["num_hidden_layers"])
    types = config.get("layer_types") or [("full_attention", "linear_attention")[layer % 2] for layer in layers]
    check_layer_types(config, types, set(MIXERS))
    return types


def _layer(config: HfConfig, kind: str) -> Layer:
    is_full = kind == "full_attention"
    names = [f"{'full' if is_full else 'linear'}_attn_{greek}_factor" for greek in ("alpha", "beta")]
    factors = [float(config[name]) for name in (*names, "mlp_alpha_factor", "mlp_beta_factor")]
    return Layer(
        MIXERS[kind],
        rope=0 if is_full else None,
        window=config.get("sliding_window") if is_full else None,
        factors=ResidualFactors(*factors),
    )


def architecture(config: HfConfig) -> Architecture:
    check_jitter(config)
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    check_supported(config, SUPPORTED | {"rotary_dim": (head_dim,)})
    routing, rule = softmax_routing(config["num_local_experts"], config["num_experts_per_tok"], normalize=True)
    return describe_decoder(
        config,
        {"moe_ffn_hidden_size": config["intermediate_size"]} | routing,
        layers=tuple(_layer(config, kind) for kind in _layer_types(config)),
        routing=rule,
        # Decays, which follow from the number of heads and layers.
        passthrough=r".*self_attn\.(slope_rate|(query|key|diagonal)_decay)",
    )


def _heads(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each head's query, key and value, then its gate."""
    dim, heads = architecture.transformer["kv_channels"], architecture.transformer["num_attention_heads"]
    sizes = 3 * dim, dim
    return [Span(part, head * size, (head + 1) * size) for head in range(heads) for part, size in enumerate(sizes)]


PROJECTED = ShardingKind(0, _heads, ("qkv_proj", "output_gate"))


def mappings(config: HfConfig) -> list[ParamMapping]:
    lightning, full = (
        tuple(layer for layer, each in enumerate(_layer_types(config)) if each == kind) for kind in MIXERS
    )
    return [
        *ENDS,
        *NORMS,
        layer_mapping("self_attn.{part}.weight", "self_attention.in_proj.weight", PROJECTED, lightning),
        layer_mapping("self_attn.norm.weight", "self_attention.norm.weight", COLUMN, lightning),
        layer_mapping("self_attn.out_proj.weight", "self_attention.out_proj.weight", ROW, lightning),
        *(replace(mapping, layers=full) for mapping in PROJECTIONS),
        *block_sparse_moe(),
    ]


FAMILY = Family(
    name="minimax",
    architectures=("MiniMaxForCausalLM",),
    models="MiniMax-Text-01 as transformers names it (the hf files)",
    architecture=architecture,
    mappings=mappings,
    limits=(
        "router_jitter_noise",
        "rotary_dim other than head_dim and shared_intermediate_size, which transformers' class ignores",
    ),
    defaults=DEFAULTS
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **{f"{part}_{greek}_factor": 1 for part in ("full_attn", "linear_attn", "mlp") for greek in ("alpha", "beta")},
    },
)
