"""LFM2: gated short convolutions and attention by turns, with norms per query and key head."""

import math
from dataclasses import replace
from typing import Any

from ..mapping.architecture import Architecture, HfConfig, Layer, ShortConvolution, TransformerArgs
from ..mapping.param_mapping import COLUMN, QKV, REPLICATED, ROW, Family, ParamMapping, ShardingKind, Span
from .decoder import DEFAULTS, ENDS, check_layer_types, check_supported, describe_decoder, layer_mapping
from .softmax_moe import MIXTRAL_GATES

GROUPS = 16  # most parts into which ranks can divide a convolution's channels
MIXERS = {"conv": "short_conv", "full_attention": "attention"}


def layer_types(config: HfConfig) -> list[str]:
    """List the kinds of the layers. Raises ValueError for unknown ones."""
    layers = range(config["num_hidden_layers"])
    full = layers if config.get("full_attn_idxs") is None else config["full_attn_idxs"]
    types = config.get("layer_types") or ["full_attention" if layer in full else "conv" for layer in layers]
    check_layer_types(config, types, set(MIXERS))
    return types


def describe_convolutional(config: HfConfig, transformer: TransformerArgs | None = None, **fields: Any) -> Architecture:
    """Return the architecture. transformer, fields: additional arguments of TransformerConfig and of Architecture."""
    check_supported(config, {"conv_bias": (False,)})
    types = layer_types(config)
    tied = config.get("tie_embedding")
    return describe_decoder(
        config
        | {"rms_norm_eps": config["norm_eps"], "hidden_act": "silu"}
        | ({} if tied is None else {"tie_word_embeddings": tied}),
        {"qk_layernorm": True} | (transformer or {}),
        layers=tuple(Layer(MIXERS[kind], rope=0 if kind == "full_attention" else None) for kind in types),
        short_conv=ShortConvolution(config["conv_L_cache"], _groups(config["hidden_size"]))
        if "conv" in types
        else None,
        **fields,
    )


def architecture(config: HfConfig) -> Architecture:
    width = config.get("block_ff_dim") or config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    return describe_convolutional(config | {"intermediate_size": width})


def _groups(channels: int) -> int:
    return math.gcd(channels, GROUPS)


def _lay_out_groups(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each group's entry gates, values and exit gates; in the checkpoint they are entry, exit, values."""
    hidden = architecture.transformer["hidden_size"]
    size = hidden // _groups(hidden)
    starts = range(0, hidden, size)
    return [Span(0, part + start, part + start + size) for start in starts for part in (0, 2 * hidden, hidden)]


PROJECTED = ShardingKind(0, _lay_out_groups)


def mixers(config: HfConfig) -> list[ParamMapping]:
    """Map the embedding, norms, convolutions and attention."""
    conv, full = (tuple(at for at, each in enumerate(layer_types(config)) if each == kind) for kind in MIXERS)
    return [
        *(replace(mapping, hf=mapping.hf.replace("model.norm", "model.embedding_norm")) for mapping in ENDS),
        layer_mapping("operator_norm.weight", "input_layernorm.weight", REPLICATED),
        layer_mapping("ffn_norm.weight", "pre_mlp_layernorm.weight", REPLICATED),
        layer_mapping("conv.in_proj.weight", "self_attention.in_proj.weight", PROJECTED, conv),
        layer_mapping("conv.conv.weight", "self_attention.conv.weight", COLUMN, conv),
        layer_mapping("conv.out_proj.weight", "self_attention.out_proj.weight", ROW, conv),
        layer_mapping("self_attn.{part}_proj.weight", "self_attention.linear_qkv.weight", QKV, full),
        layer_mapping("self_attn.out_proj.weight", "self_attention.linear_proj.weight", ROW, full),
        layer_mapping("self_attn.q_layernorm.weight", "self_attention.q_layernorm.weight", REPLICATED, full),
        layer_mapping("self_attn.k_layernorm.weight", "self_attention.k_layernorm.weight", REPLICATED, full),
    ]


def dense_mlp(layers: tuple[int, ...] | None = None) -> list[ParamMapping]:
    """Map the MLPs of `layers`, by default all."""
    return [
        layer_mapping("feed_forward.{part}.weight", "mlp.linear_fc1.weight", MIXTRAL_GATES, layers),
        layer_mapping("feed_forward.w2.weight", "mlp.linear_fc2.weight", ROW, layers),
    ]


def mappings(config: HfConfig) -> list[ParamMapping]:
    return mixers(config) + dense_mlp()


FAMILY = Family(
    name="lfm2",
    architectures=("Lfm2ForCausalLM",),
    models="LFM2 and LFM2.5 (350M to 2.6B)",
    architecture=architecture,
    mappings=mappings,
    limits=("conv_bias",),
    defaults=DEFAULTS
    | {
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
)
