"""What Qwen3-Next and Qwen3.5 share: most layers mix tokens by gated delta nets, the others by gated attention.

Norms are stored as what is added to 1, except for those behind a delta net.
"""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import COLUMN, QKV, REPLICATED, ROW, Architecture, Kind, Layer, Row, Span
from .decoder import ATTENTION, ENDS, HF_LAYER, LAYER, QK_NORMS, attention_biases, check_known, describe_decoder

# Those of transformers' Qwen3NextConfig that Qwen3.5's configs share.
DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
# What the layers compute, where a config.json may say otherwise.
KNOWN = {
    "hidden_act": ("silu", "swish"),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
}


def describe_hybrid(config: dict[str, Any], settings: dict[str, Any], **transformer: Any) -> Architecture:
    """As `describe_decoder`. Raises ValueError for a setting that the layers do not know."""
    check_known(config, KNOWN)
    key_heads, value_heads = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(
            f"config.json has linear_num_value_heads {value_heads} and linear_num_key_heads {key_heads}: the second "
            "must divide the first"
        )
    bias = bool(config.get("attention_bias"))
    architecture = describe_decoder(
        config,
        settings,
        qk_layernorm=True,
        add_qkv_bias=bias,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        **{key: value for key, value in settings.items() if key.startswith("linear_")},
        **transformer,
    )
    delta = delta_layers(config, settings)
    layers = (Layer("gated_delta_net", rope=None) if layer in delta else Layer() for layer in _all(settings))
    # Layers that predict further tokens, and the tower of vision-language models.
    carried = r"mtp\.|model\.visual\."
    return replace(architecture, output_bias=bias, layers=tuple(layers), carried=carried)


def delta_layers(config: dict[str, Any], settings: dict[str, Any]) -> tuple[int, ...]:
    """Those that mix by gated delta nets. Raises ValueError where layer_types names another kind of layer."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(layer for layer in _all(settings) if (layer + 1) % settings["full_attention_interval"])
    if set(kinds) - {"linear_attention", "full_attention"} or len(kinds) != settings["num_hidden_layers"]:
        raise ValueError(
            f"config.json has layer_types {kinds}; this family is known with linear_attention or full_attention for "
            f"each of the {settings['num_hidden_layers']} layers"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def _all(settings: dict[str, Any]) -> range:
    return range(settings["num_hidden_layers"])


def _gated_query_groups(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """For each query group its query heads, their gates, its key head, its value head.

    In the checkpoint a head's gate follows its query.
    """
    heads, groups = architecture.transformer["num_attention_heads"], architecture.transformer["num_query_groups"]
    one = length // (2 * heads + 2 * groups)
    spans = []
    for group in range(groups):
        mine = range(group * (heads // groups), (group + 1) * (heads // groups))
        spans += [Span(0, 2 * head * one, (2 * head + 1) * one) for head in mine]
        spans += [Span(0, (2 * head + 1) * one, (2 * head + 2) * one) for head in mine]
        spans += [Span(part, group * one, (group + 1) * one) for part in (1, 2)]
    return spans


def _sizes(architecture: Architecture) -> tuple[int, int, int, int]:
    """Key heads; the size of one; value heads for each; the size of all these."""
    of = architecture.transformer
    heads = of["linear_num_value_heads"] // of["linear_num_key_heads"]
    return of["linear_num_key_heads"], of["linear_key_head_dim"], heads, heads * of["linear_value_head_dim"]


def _mixed(group: int, architecture: Architecture) -> list[Span]:
    """What of a group is convolved: its query, its key, its values; in the checkpoint all queries come first."""
    groups, key, _, values = _sizes(architecture)
    second, third = groups * key, 2 * groups * key
    return [
        Span(0, group * key, (group + 1) * key),
        Span(0, second + group * key, second + (group + 1) * key),
        Span(0, third + group * values, third + (group + 1) * values),
    ]


def _convolved(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    return [span for group in range(_sizes(architecture)[0]) for span in _mixed(group, architecture)]


def _projected(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """For each key head: query, key, values, gates, betas, decays. See layers/gated_delta.py."""
    groups, _, heads, values = _sizes(architecture)
    spans = []
    for group in range(groups):
        spans += _mixed(group, architecture)
        spans += [Span(part, group * size, (group + 1) * size) for part, size in ((1, values), (2, heads), (3, heads))]
    return spans


def _projected_groups(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """The same where the checkpoint has it by key heads, in two matrices."""
    groups, key, heads, values = _sizes(architecture)
    sizes = (2 * key + 2 * values, 2 * heads)
    return [Span(part, g * size, (g + 1) * size) for g in range(groups) for part, size in enumerate(sizes)]


GATED_QKV = Kind(0, _gated_query_groups, ("q", "k", "v"))
CONVOLVED = Kind(0, _convolved)
PROJECTED = Kind(0, _projected, ("qkv", "z", "b", "a"))
PROJECTED_GROUPS = Kind(0, _projected_groups, ("qkvz", "ba"))


def hybrid(config: dict[str, Any], settings: dict[str, Any], projected: Kind, *, fp32: bool) -> list[Row]:
    """All but the feed-forward layers; `fp32`: whether decays and norms of delta nets lie in the checkpoint so."""
    delta = delta_layers(config, settings)
    full = tuple(layer for layer in _all(settings) if layer not in delta)
    hf, mcore = HF_LAYER + "linear_attn.", LAYER + "self_attention."
    rows = list(ENDS)
    for row in ATTENTION + QK_NORMS + attention_biases(config):
        if ".self_attn." in row.hf:
            row = replace(row, kind=GATED_QKV if row.kind is QKV else row.kind, layers=full)
        rows.append(row)
    return [
        *rows,
        Row(hf + "in_proj_{part}.weight", mcore + "in_proj.weight", projected, delta),
        Row(hf + "conv1d.weight", mcore + "conv1d.weight", CONVOLVED, delta),
        Row(hf + "A_log", mcore + "A_log", COLUMN, delta, fp32=fp32),
        Row(hf + "dt_bias", mcore + "dt_bias", COLUMN, delta),
        Row(hf + "norm.weight", mcore + "norm.weight", REPLICATED, delta, fp32=fp32),
        Row(hf + "out_proj.weight", mcore + "out_proj.weight", ROW, delta),
    ]
