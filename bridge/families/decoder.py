"""What decoders of Llama's shape have in common: pre-norms, grouped queries with rotary embeddings, a gated MLP.

A family starts from these and adds its own. All of them read the raw config.json, in which a missing key means the
default of the family's config class in transformers.
"""

import math
from collections.abc import Container, Mapping
from typing import Any

from ..mapping.param_mapping import FUSED_GATE_UP, GATE_UP, QKV, REPLICATED, ROW, VOCAB, Architecture, Layer, Rope, Row

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def with_defaults(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The keys of `defaults`, with the values of `config` where it has them (null counts as missing)."""
    return {key: default if config.get(key) is None else config[key] for key, default in defaults.items()}


def check_known(config: dict[str, Any], known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError where `config` has a key of `known` with another value than these (or null)."""
    for key, values in known.items():
        if config.get(key) not in (None, *values):
            which = " or ".join(map(repr, values))
            raise ValueError(f"config.json has {key} {config[key]!r}; this family is known with {which} only")


def dense_layers(settings: dict[str, Any], moe: Container[int]) -> tuple[int, ...]:
    """The layers that are not among `moe`."""
    return tuple(layer for layer in range(settings["num_hidden_layers"]) if layer not in moe)


def rope(
    config: dict[str, Any],
    head_dim: int,
    max_positions: int,
    *,
    base: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
) -> Rope:
    """The rule of rotary embeddings, from `rope_theta` with `rope_scaling` or from `rope_parameters`.

    `base` is what holds where config.json gives none, and `partial` the same of partial_rotary_factor (None: the family
    turns whole heads). Raises ValueError for a rule that the layers do not know, and where there are two.
    """
    if config.get("rope_parameters") and config.get("rope_scaling"):
        alone = [
            rope(config | {other: None}, head_dim, max_positions, base=base, partial=partial, interleaved=interleaved)
            for other in ("rope_scaling", "rope_parameters")
        ]
        if alone[0] != alone[1]:  # transformers takes rope_scaling alone, and without its rope_theta the default
            raise ValueError(
                "config.json has rope_parameters and rope_scaling, which say different things: put what is meant into "
                "rope_parameters, with its rope_theta, and remove rope_scaling"
            )
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in settings.values()):
        raise ValueError(
            "config.json has rope_parameters for each type of layer: this family is known with one for all"
        )
    base = settings.pop("rope_theta", None) or config.get("rope_theta") or base
    given = settings.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    if partial is None and given not in (None, 1.0):
        raise ValueError(f"config.json has partial_rotary_factor {given}: this family is known with whole heads only")
    dim = int(head_dim * (given or partial or 1.0))
    original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    return Rope(float(base), dim, _scaling(settings, dim, original, max_positions), interleaved)


def _scaling(settings: dict[str, Any], dim: int, original: int | None, max_positions: int) -> dict[str, Any] | None:
    """In one spelling, with nothing left out, as transformers' modeling_rope_utils fills in what is missing."""
    kind = settings.get("rope_type") or settings.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn", "longrope"):
        reason = ", whose frequencies change with the longest text seen so far" if kind == "dynamic" else ""
        raise ValueError(
            f"config.json asks for rope scaling of type {kind!r}{reason}; known are default, linear, llama3, yarn and "
            "longrope. To train within the original length, remove rope_scaling (or rope_parameters' rope_type) from "
            "config.json"
        )
    scaling = {key: value for key, value in settings.items() if key != "type"} | {"rope_type": kind}
    if kind == "linear":
        return scaling
    original = scaling["original_max_position_embeddings"] = original or max_positions
    if kind == "llama3":
        return scaling
    factor = scaling["factor"] = settings.get("factor") or max_positions / original
    amounts = (1.0, 0.0)
    if kind == "yarn":
        scaling["beta_fast"], scaling["beta_slow"] = settings.get("beta_fast") or 32, settings.get("beta_slow") or 1
        scaling["truncate"] = settings.get("truncate", True)
        if settings.get("mscale") and settings.get("mscale_all_dim"):
            amounts = settings["mscale"], settings["mscale_all_dim"]
    else:
        for key in ("short_factor", "long_factor"):
            if len(settings.get(key) or ()) != dim // 2:
                raise ValueError(f"config.json's rope scaling has no {key} with a number for each of {dim // 2} planes")
    if settings.get("attention_factor") is None:
        grown = math.log(max(factor, 1.0))
        scaling["attention_factor"] = (
            (0.1 * amounts[0] * grown + 1) / (0.1 * amounts[1] * grown + 1)
            if kind == "yarn"
            else math.sqrt(1 + grown / math.log(original))
        )
    return scaling


def windowed(config: dict[str, Any], layers: int, *, default: list[str]) -> tuple[Layer, ...]:
    """Layers of which some attend to a sliding window, as `layer_types` says; `default`: where it is not there.

    Raises ValueError for other types, and for windows without a length.
    """
    kinds, window = config.get("layer_types") or default, config.get("sliding_window", 4096)
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"config.json has layer_types {kinds}: there must be one for each of the {layers} layers, full_attention "
            "or sliding_attention"
        )
    if "sliding_attention" in kinds and not window:
        raise ValueError("config.json has layer_types with sliding_attention, and no sliding_window for their length")
    return tuple(Layer(window=window if kind == "sliding_attention" else None) for kind in kinds)


def qwen_windows(config: dict[str, Any], layers: int) -> tuple[Layer, ...]:
    """Qwen's: switched on by use_sliding_window, from layer max_window_layers on."""
    if not config.get("use_sliding_window"):
        config = config | {"sliding_window": None}
    window, first = config.get("sliding_window", 4096), config.get("max_window_layers", 28)
    sliding = [window is not None and layer >= first for layer in range(layers)]
    return windowed(config, layers, default=["sliding_attention" if on else "full_attention" for on in sliding])


ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh")


def activation(name: str) -> str:
    """Its name in build.py. Raises ValueError for one that the layers do not know."""
    if name not in ACTIVATIONS:
        raise ValueError(f"config.json has hidden_act {name!r}; known are {', '.join(ACTIVATIONS)}")
    return "silu" if name == "swish" else name


def describe_decoder(config: dict[str, Any], settings: dict[str, Any], **transformer: Any) -> Architecture:
    """The architecture of a decoder of Llama's shape.

    `settings` are its keys with the family's defaults filled in; `transformer` is what the family adds. Keys of
    `settings` that not all families have: rope_theta and partial_rotary_factor (defaults), rope_interleaved.
    """
    heads = settings["num_attention_heads"]
    head_dim = settings["head_dim"] or settings["hidden_size"] // heads
    turning = rope(
        config,
        head_dim,
        settings["max_position_embeddings"],
        base=settings.get("rope_theta", 10000.0),
        partial=settings.get("partial_rotary_factor"),
        interleaved=settings.get("rope_interleaved", False),
    )
    return Architecture(
        transformer={
            "num_layers": settings["num_hidden_layers"],
            "hidden_size": settings["hidden_size"],
            "ffn_hidden_size": settings["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": settings["num_key_value_heads"] or heads,
            "kv_channels": head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": settings["rms_norm_eps"],
            "gated_linear_unit": True,
            "activation_func": activation(settings["hidden_act"]),
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **transformer,
        },
        vocab_size=settings["vocab_size"],
        tied=settings["tie_word_embeddings"],
        max_positions=settings["max_position_embeddings"],
        ropes=(turning,),
        layers=(Layer(),) * settings["num_hidden_layers"],
    )


ENDS = [
    Row("model.embed_tokens.weight", "embedding.word_embeddings.weight", VOCAB),
    Row("model.norm.weight", "decoder.final_layernorm.weight", REPLICATED),
    Row("lm_head.weight", "output_layer.weight", VOCAB),
]

PROJECTIONS = [
    Row(HF_LAYER + "self_attn.{part}_proj.weight", LAYER + "self_attention.linear_qkv.weight", QKV),
    Row(HF_LAYER + "self_attn.o_proj.weight", LAYER + "self_attention.linear_proj.weight", ROW),
]

NORMS = [
    Row(HF_LAYER + "input_layernorm.weight", LAYER + "input_layernorm.weight", REPLICATED),
    Row(HF_LAYER + "post_attention_layernorm.weight", LAYER + "pre_mlp_layernorm.weight", REPLICATED),
]

ATTENTION = NORMS + PROJECTIONS

QKV_BIAS = [Row(HF_LAYER + "self_attn.{part}_proj.bias", LAYER + "self_attention.linear_qkv.bias", QKV)]

OUTPUT_BIAS = [Row(HF_LAYER + "self_attn.o_proj.bias", LAYER + "self_attention.linear_proj.bias", REPLICATED)]

FUSED_MLP = [
    Row(HF_LAYER + "mlp.gate_up_proj.weight", LAYER + "mlp.linear_fc1.weight", FUSED_GATE_UP),
    Row(HF_LAYER + "mlp.down_proj.weight", LAYER + "mlp.linear_fc2.weight", ROW),
]

MLP_BIASES = [
    Row(HF_LAYER + "mlp.{part}_proj.bias", LAYER + "mlp.linear_fc1.bias", GATE_UP),
    Row(HF_LAYER + "mlp.down_proj.bias", LAYER + "mlp.linear_fc2.bias", REPLICATED),
]

QK_NORMS = [
    Row(HF_LAYER + "self_attn.q_norm.weight", LAYER + "self_attention.q_layernorm.weight", REPLICATED),
    Row(HF_LAYER + "self_attn.k_norm.weight", LAYER + "self_attention.k_layernorm.weight", REPLICATED),
]


def attention_biases(config: dict[str, Any]) -> list[Row]:
    """Of all four projections, or of none."""
    return QKV_BIAS + OUTPUT_BIAS if config.get("attention_bias") else []


def mlp(layers: tuple[int, ...] | None = None) -> list[Row]:
    """A dense gated MLP, in all layers or in `layers`."""
    return [
        Row(HF_LAYER + "mlp.{part}_proj.weight", LAYER + "mlp.linear_fc1.weight", GATE_UP, layers),
        Row(HF_LAYER + "mlp.down_proj.weight", LAYER + "mlp.linear_fc2.weight", ROW, layers),
    ]


def experts(layers: tuple[int, ...] | None = None) -> list[Row]:
    """A router and gated experts, in all layers or in `layers`."""
    hf, mcore = HF_LAYER + "mlp.experts.{expert}.", LAYER + "mlp.experts."
    return [
        Row(HF_LAYER + "mlp.gate.weight", LAYER + "mlp.router.weight", REPLICATED, layers),
        Row(hf + "{part}_proj.weight", mcore + "linear_fc1.weight", GATE_UP, layers),
        Row(hf + "down_proj.weight", mcore + "linear_fc2.weight", ROW, layers),
    ]


def shared_experts(name: str, layers: tuple[int, ...], *, gate: bool = False) -> list[Row]:
    """The experts that every token has, as one gated MLP that is called `name` in the checkpoint.

    `gate`: each token's share of it is a sigmoid.
    """
    hf, mcore = HF_LAYER + f"mlp.{name}", LAYER + "mlp.shared_experts."
    rows = [
        Row(hf + ".{part}_proj.weight", mcore + "linear_fc1.weight", GATE_UP, layers),
        Row(hf + ".down_proj.weight", mcore + "linear_fc2.weight", ROW, layers),
    ]
    return [*rows, Row(hf + "_gate.weight", mcore + "gate_weight", REPLICATED, layers)] if gate else rows
