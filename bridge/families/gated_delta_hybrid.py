"""Decoder of Qwen3-Next and Qwen3.5: most layers are gated delta nets, the others have gated attention.

Norm weights are stored as differences from 1, except those after a delta net.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..mapping.architecture import Architecture, HfConfig, Layer, TransformerArgs
from ..mapping.param_mapping import COLUMN, QKV, REPLICATED, ROW, ParamMapping, ShardingKind, Span
from .decoder import (
    ATTENTION,
    ENDS,
    QK_NORMS,
    attention_biases,
    check_layer_types,
    check_supported,
    describe_decoder,
    layer_mapping,
    prediction_layer,
)
from .decoder import DEFAULTS as DECODER

# Defaults of transformers' Qwen3NextConfig that Qwen3.5's configs share.
DEFAULTS = DECODER | {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
LINEAR = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
MTP_NAMES = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "final_layernorm": "mtp.norm",
}
# The layers support only these values.
SUPPORTED = {
    "hidden_act": ("silu", "swish"),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
}


def describe_hybrid(config: HfConfig, transformer: TransformerArgs | None = None, **fields: Any) -> Architecture:
    """Return the architecture of a hybrid. Arguments as in `describe_decoder`. Raises ValueError if unsupported."""
    check_supported(config, SUPPORTED)
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(
            f"config.json has linear_num_value_heads {value_heads} and linear_num_key_heads {key_heads}: the second "
            "must divide the first"
        )
    arguments = {
        "qk_layernorm": True,
        "add_qkv_bias": config["attention_bias"],
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        **{f"linear_{name}": config[f"linear_{name}"] for name in LINEAR},
    }
    delta = delta_layers(config)
    layers = range(config["num_hidden_layers"])
    return describe_decoder(
        config,
        arguments | (transformer or {}),
        partial_rotary=True,
        output_bias=config["attention_bias"],
        layers=tuple(Layer("gated_delta_net", rope=None) if layer in delta else Layer() for layer in layers),
        # Multi-token prediction, and the vision tower of vision-language models.
        passthrough=r"mtp\.|model\.visual\.",
        **fields,
    )


def delta_layers(config: HfConfig) -> tuple[int, ...]:
    """List the layers with gated delta nets. Raises ValueError for unknown layer_types."""
    types, interval = config.get("layer_types"), config["full_attention_interval"]
    if types is None:
        return tuple(layer for layer in range(config["num_hidden_layers"]) if (layer + 1) % interval)
    check_layer_types(config, types, {"linear_attention", "full_attention"})
    return tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")


def _gated_query_groups(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each query group as its query heads, their gates, its key head, its value head.

    In the checkpoint a head's gate follows its query.
    """
    heads, groups = architecture.transformer["num_attention_heads"], architecture.transformer["num_query_groups"]
    dim = length // (2 * heads + 2 * groups)
    spans = []
    for group in range(groups):
        queries = range(group * (heads // groups), (group + 1) * (heads // groups))
        spans += [Span(0, 2 * head * dim, (2 * head + 1) * dim) for head in queries]
        spans += [Span(0, (2 * head + 1) * dim, (2 * head + 2) * dim) for head in queries]
        spans += [Span(part, group * dim, (group + 1) * dim) for part in (1, 2)]
    return spans


def _sizes(architecture: Architecture) -> tuple[int, int, int, int]:
    """Return the number of key heads, their size, the value heads per key head, and the total size of the latter."""
    arguments = architecture.transformer
    heads = arguments["linear_num_value_heads"] // arguments["linear_num_key_heads"]
    values = heads * arguments["linear_value_head_dim"]
    return arguments["linear_num_key_heads"], arguments["linear_key_head_dim"], heads, values


def _convolved_group(group: int, architecture: Architecture) -> list[Span]:
    """Lay out a group's query, key and values; in the checkpoint all queries come first."""
    groups, key, _, values = _sizes(architecture)
    keys_start, values_start = groups * key, 2 * groups * key
    return [
        Span(0, group * key, (group + 1) * key),
        Span(0, keys_start + group * key, keys_start + (group + 1) * key),
        Span(0, values_start + group * values, values_start + (group + 1) * values),
    ]


def _convolved(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    return [span for group in range(_sizes(architecture)[0]) for span in _convolved_group(group, architecture)]


def _projected(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each key head's query, key, values, gates, betas, decays. See layers/gated_delta.py."""
    groups, _, heads, values = _sizes(architecture)
    spans = []
    for group in range(groups):
        spans += _convolved_group(group, architecture)
        spans += [Span(part, group * size, (group + 1) * size) for part, size in ((1, values), (2, heads), (3, heads))]
    return spans


def _projected_groups(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out the same from a checkpoint with two matrices, ordered by key heads."""
    groups, key, heads, values = _sizes(architecture)
    sizes = (2 * key + 2 * values, 2 * heads)
    return [Span(part, g * size, (g + 1) * size) for g in range(groups) for part, size in enumerate(sizes)]


GATED_QKV = ShardingKind(0, _gated_query_groups, ("q", "k", "v"))
CONVOLVED = ShardingKind(0, _convolved)
PROJECTED = ShardingKind(0, _projected, ("qkv", "z", "b", "a"))
PROJECTED_GROUPS = ShardingKind(0, _projected_groups, ("qkvz", "ba"))


def hybrid(config: HfConfig, projected: ShardingKind, *, fp32: bool) -> list[ParamMapping]:
    """Map all but the feed-forward layers. fp32: the checkpoint has decays and norms of delta nets in fp32."""
    delta = delta_layers(config)
    attention = tuple(layer for layer in range(config["num_hidden_layers"]) if layer not in delta)
    mappings = list(ENDS)
    for mapping in ATTENTION + QK_NORMS + attention_biases(config):
        if ".self_attn." in mapping.hf:
            mapping = replace(mapping, kind=GATED_QKV if mapping.kind is QKV else mapping.kind, layers=attention)
        mappings.append(mapping)
    hf, mcore = "linear_attn.", "self_attention."
    return [
        *mappings,
        layer_mapping(hf + "in_proj_{part}.weight", mcore + "in_proj.weight", projected, delta),
        layer_mapping(hf + "conv1d.weight", mcore + "conv1d.weight", CONVOLVED, delta),
        layer_mapping(hf + "A_log", mcore + "A_log", COLUMN, delta, fp32=fp32),
        layer_mapping(hf + "dt_bias", mcore + "dt_bias", COLUMN, delta),
        layer_mapping(hf + "norm.weight", mcore + "norm.weight", REPLICATED, delta, fp32=fp32),
        layer_mapping(hf + "out_proj.weight", mcore + "out_proj.weight", ROW, delta),
    ]


def mtp_mappings(
    mappings: Callable[[HfConfig], list[ParamMapping]], config: HfConfig, depths: int
) -> list[ParamMapping]:
    """Map the layer of multi-token prediction, which attends, and has experts if the model has some.

    Raises ValueError for further layers, which would share these tensors, and for embeddings of its own.
    """
    stored = config.get("mtp_num_hidden_layers", 1)
    if depths > 1 or stored != 1:
        raise ValueError(f"--mtp_num_layers {depths}: config.json has {stored} such layers; 1 layer is supported")
    if config.get("mtp_use_dedicated_embeddings"):
        raise ValueError("--mtp_num_layers 1: config.json has mtp_use_dedicated_embeddings true, which is unsupported")
    entries = mappings(config)
    sparse = next((entry.layers for entry in entries if entry.mcore.endswith("mlp.router.weight")), None)
    like = {layer for layer in range(config["num_hidden_layers"]) if layer not in delta_layers(config)}
    like &= like if sparse is None else set(sparse)
    if not like:
        raise ValueError("--mtp_num_layers 1: no layer of this model has both attention and experts, as that one has")
    return prediction_layer(entries, max(like), 0, "mtp.layers.0.", MTP_NAMES)
