"""What decoders of Llama's shape have in common: pre-norms, grouped queries with rotary embeddings, a gated MLP.

A family starts from these and adds its own. All of them read the raw config.json, in which a missing key means the
default of the family's config class in transformers.
"""

from typing import Any

from ..rows import GATE_UP, QKV, REPLICATED, ROW, VOCAB, Architecture, Layer, Rope, Row

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def with_defaults(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The keys of `defaults`, with the values of `config` where it has them (null counts as missing)."""
    return {key: default if config.get(key) is None else config[key] for key, default in defaults.items()}


def rope(config: dict[str, Any], max_positions: int, *, base: float = 10000.0) -> tuple[float, dict[str, Any] | None]:
    """The base and the scaling of rotary embeddings, from `rope_theta` with `rope_scaling` or from `rope_parameters`.

    `base` is what holds where config.json gives none. Raises ValueError for a rule that the layers do not know.
    """
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in settings.values()):
        raise ValueError(
            "config.json has rope_parameters for each type of layer: this family is known with one for all"
        )
    base = settings.pop("rope_theta", None) or config.get("rope_theta") or base
    kind = settings.get("rope_type") or settings.get("type") or "default"
    settings.pop("type", None)
    partial = settings.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"config.json has partial_rotary_factor {partial}: this family is known with whole heads only")
    if kind == "default":
        return float(base), None
    if kind not in ("linear", "llama3"):
        raise ValueError(
            f"config.json asks for rope scaling of type {kind!r}; known are default, linear and llama3. To train "
            "within the original length, remove rope_scaling (or rope_parameters' rope_type) from config.json"
        )
    if kind == "llama3":
        settings.setdefault("original_max_position_embeddings", max_positions)
    return float(base), {**settings, "rope_type": kind}


def refuse_sliding_window(config: dict[str, Any], layers: int, *, first: int) -> None:
    """Raise ValueError where a layer would attend to a window only; `first` is the first such layer by default."""
    kinds = config.get("layer_types")
    if kinds is None and config.get("use_sliding_window") and config.get("sliding_window", 0) is not None:
        kinds = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
    if kinds and any(kind != "full_attention" for kind in kinds):
        raise ValueError(
            "config.json has use_sliding_window or layer_types with layers that attend to a sliding window, which this "
            'version cannot train. Set "use_sliding_window": false (and remove layer_types) to attend to everything'
        )


def describe_decoder(config: dict[str, Any], settings: dict[str, Any], **transformer: Any) -> Architecture:
    """The architecture of a decoder of Llama's shape.

    `settings` are its keys with the family's defaults filled in; `transformer` is what the family adds.
    """
    import torch.nn.functional as F

    if "quantization_config" in config:
        raise ValueError(
            "config.json has quantization_config: this version reads unquantised weights only. Take the "
            "model's checkpoint in bfloat16"
        )
    if settings["hidden_act"] not in ("silu", "swish"):
        raise ValueError(
            f"config.json has hidden_act {settings['hidden_act']!r}; this family is known with 'silu' only"
        )
    heads = settings["num_attention_heads"]
    head_dim = settings["head_dim"] or settings["hidden_size"] // heads
    base, scaling = rope(config, settings["max_position_embeddings"])
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
            "activation_func": F.silu,
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
        ropes=(Rope(base, head_dim, scaling),),
        layers=(Layer(),) * settings["num_hidden_layers"],
    )


ENDS = [
    Row("model.embed_tokens.weight", "embedding.word_embeddings.weight", VOCAB),
    Row("model.norm.weight", "decoder.final_layernorm.weight", REPLICATED),
    Row("lm_head.weight", "output_layer.weight", VOCAB),
]

ATTENTION = [
    Row(HF_LAYER + "input_layernorm.weight", LAYER + "input_layernorm.weight", REPLICATED),
    Row(HF_LAYER + "self_attn.{part}_proj.weight", LAYER + "self_attention.linear_qkv.weight", QKV),
    Row(HF_LAYER + "self_attn.o_proj.weight", LAYER + "self_attention.linear_proj.weight", ROW),
    Row(HF_LAYER + "post_attention_layernorm.weight", LAYER + "pre_mlp_layernorm.weight", REPLICATED),
]

QKV_BIAS = [Row(HF_LAYER + "self_attn.{part}_proj.bias", LAYER + "self_attention.linear_qkv.bias", QKV)]

OTHER_BIASES = [
    Row(HF_LAYER + "self_attn.o_proj.bias", LAYER + "self_attention.linear_proj.bias", REPLICATED),
    Row(HF_LAYER + "mlp.{part}_proj.bias", LAYER + "mlp.linear_fc1.bias", GATE_UP),
    Row(HF_LAYER + "mlp.down_proj.bias", LAYER + "mlp.linear_fc2.bias", REPLICATED),
]

QK_NORMS = [
    Row(HF_LAYER + "self_attn.q_norm.weight", LAYER + "self_attention.q_layernorm.weight", REPLICATED),
    Row(HF_LAYER + "self_attn.k_norm.weight", LAYER + "self_attention.k_layernorm.weight", REPLICATED),
]


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
