"""Building blocks of Llama-like decoders: pre-norms, grouped-query attention with rotary embeddings, gated MLPs.

A `config` is the result of `Family.read`: a config.json with the defaults of the family's transformers config class.
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..mapping.architecture import Architecture, HfConfig, Layer, Rope, TransformerArgs
from ..mapping.param_mapping import FUSED_GATE_UP, GATE_UP, QKV, REPLICATED, ROW, VOCAB, ParamMapping, ShardingKind

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."

# Defaults that most config classes of transformers share.
DEFAULTS: HfConfig = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def layer_mapping(
    hf: str, mcore: str, kind: ShardingKind, layers: tuple[int, ...] | None = None, **settings: bool
) -> ParamMapping:
    """Map a tensor of each layer, by its names within the layer. settings: further fields of `ParamMapping`."""
    return ParamMapping(HF_LAYER + hf, LAYER + mcore, kind, layers, **settings)


def prediction_layer(
    mappings: Iterable[ParamMapping], like: int, depth: int, hf: str, names: Mapping[str, str]
) -> list[ParamMapping]:
    """Map a layer of multi-token prediction (layers/mtp.py), within which is a layer as the model's layer `like`.

    hf: prefix of the inner layer's names in the checkpoint
    names: the checkpoint's names of eh_proj, enorm, hnorm and final_layernorm
    """
    mcore = "mtp.layers.{layer}."
    inner = [
        replace(
            mapping,
            hf=mapping.hf.replace(HF_LAYER, hf),
            mcore=mapping.mcore.replace(LAYER, mcore + "mtp_model_layer."),
            layers=(depth,),
        )
        for mapping in mappings
        if LAYER in mapping.mcore and (mapping.layers is None or like in mapping.layers)
    ]
    return inner + [
        ParamMapping(f"{name}.weight", f"{mcore}{place}.weight", REPLICATED, (depth,)) for place, name in names.items()
    ]


def check_supported(config: HfConfig, supported: Mapping[str, tuple[object, ...]]) -> None:
    """Raise ValueError if a key of `supported` has a value in `config` that is neither listed nor null."""
    for key, values in supported.items():
        if config.get(key) not in (None, *values):
            options = " or ".join(map(repr, values))
            raise ValueError(f"config.json has {key} {config[key]!r}; this family is supported with {options} only")


def check_layer_types(config: HfConfig, types: list[str], supported: set[str]) -> None:
    """Raise ValueError unless `types` has one of the `supported` types for each layer."""
    layers = config["num_hidden_layers"]
    if len(types) != layers or set(types) - supported:
        raise ValueError(
            f"config.json has layer_types {types}: set one for each of the {layers} layers, "
            f"{' or '.join(sorted(supported))}"
        )


def dense_layers(config: HfConfig, moe: Container[int]) -> tuple[int, ...]:
    """List the layers that are not among `moe`."""
    return tuple(layer for layer in range(config["num_hidden_layers"]) if layer not in moe)


def read_rope(
    config: HfConfig, head_dim: int, *, base: float = 10000.0, partial: bool = False, interleaved: bool = False
) -> Rope:
    """Read the rotary embedding from `rope_theta` with `rope_scaling`, or from `rope_parameters`.

    base: default of rope_theta. partial: the family supports partial rotary embeddings. Raises ValueError for an
    unsupported rope, and for two different ropes.
    """
    if config.get("rope_parameters") and config.get("rope_scaling"):
        ropes = [
            read_rope(config | {unused_key: None}, head_dim, base=base, partial=partial, interleaved=interleaved)
            for unused_key in ("rope_scaling", "rope_parameters")
        ]
        if ropes[0] != ropes[1]:  # transformers uses only rope_scaling, with the default rope_theta if it has none
            raise ValueError(
                "config.json has rope_parameters and rope_scaling, which say different things: put what is meant into "
                "rope_parameters, with its rope_theta, and remove rope_scaling"
            )
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings = {key: value for key, value in settings.items() if not key.startswith("mrope_")}
    if any(isinstance(value, dict) for value in settings.values()):
        raise ValueError("config.json has rope_parameters for each type of layer: this family is supported with one")
    is_proportional = "proportional" in (settings.get("rope_type"), settings.get("type"))
    base = settings.pop("rope_theta", None) or config.get("rope_theta") or base
    if is_proportional:  # all planes are there, and some have the frequency 0
        settings.setdefault("partial_rotary_factor", 1.0)
        fraction = 1.0
    else:
        fraction = settings.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if not partial and fraction != 1.0:
        raise ValueError(f"config.json has partial_rotary_factor {fraction}: this family is supported with 1.0 only")
    dim, positions = int(head_dim * fraction), config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    return Rope(float(base), dim, _read_scaling(settings, dim, original, positions), interleaved)


def _read_scaling(settings: HfConfig, dim: int, original: int | None, max_positions: int) -> HfConfig | None:
    """Return normalized rope scaling, with the default values of transformers' modeling_rope_utils."""
    kind = settings.get("rope_type") or settings.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn", "longrope", "proportional"):
        reason = ", whose frequencies change with the longest text seen so far" if kind == "dynamic" else ""
        raise ValueError(
            f"config.json asks for rope scaling of type {kind!r}{reason}; supported are default, linear, llama3, yarn, "
            "longrope and proportional. To train within the original length, remove rope_scaling (or rope_parameters' "
            "rope_type) from config.json"
        )
    scaling = {key: value for key, value in settings.items() if key != "type"} | {"rope_type": kind}
    if kind == "linear":
        return scaling
    if kind == "proportional":
        return {"factor": 1.0} | scaling
    original = scaling["original_max_position_embeddings"] = original or max_positions
    if kind == "llama3":
        return scaling
    factor = scaling["factor"] = settings.get("factor") or max_positions / original
    mscales = (1.0, 0.0)
    if kind == "yarn":
        scaling["beta_fast"], scaling["beta_slow"] = settings.get("beta_fast") or 32, settings.get("beta_slow") or 1
        scaling["truncate"] = settings.get("truncate", True)
        if settings.get("mscale") and settings.get("mscale_all_dim"):
            mscales = settings["mscale"], settings["mscale_all_dim"]
    else:
        for key in ("short_factor", "long_factor"):
            if len(settings.get(key) or ()) != dim // 2:
                raise ValueError(f"config.json's rope scaling has no {key} with a number for each of {dim // 2} planes")
    if settings.get("attention_factor") is None:
        log_factor = math.log(max(factor, 1.0))
        scaling["attention_factor"] = (
            (0.1 * mscales[0] * log_factor + 1) / (0.1 * mscales[1] * log_factor + 1)
            if kind == "yarn"
            else math.sqrt(1 + log_factor / math.log(original))
        )
    return scaling


def fill_rope(config: HfConfig, rope: HfConfig) -> HfConfig:
    """Return `config` with the rope_parameters `rope`, if it has neither rope_parameters nor rope_scaling.

    Raises ValueError for a rope_theta without them that differs, which transformers ignores.
    """
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return config
    if config.get("rope_theta") not in (None, rope["rope_theta"]):
        raise ValueError(
            f"config.json has rope_theta {config['rope_theta']} and no rope_parameters: transformers' class then "
            f"takes {rope['rope_theta']}. Set rope_parameters"
        )
    return config | {"rope_parameters": rope}


def read_ropes(
    config: HfConfig, head_dim: int, *, full_base: float = 10000.0, sliding_base: float = 10000.0
) -> tuple[Rope, Rope]:
    """Read the ropes of layers with full and with sliding-window attention, which `rope_parameters` has by type.

    full_base, sliding_base: defaults of their rope_theta. As in transformers, rope_scaling belongs to layers with full
    attention, and takes precedence over their rope_parameters.
    """
    named = config.get("rope_parameters") or {}
    if named.keys() - {"full_attention", "sliding_attention"}:
        raise ValueError("config.json has one set of rope_parameters: set full_attention and sliding_attention in it")
    full = dict(named.get("full_attention") or {}) | dict(config.get("rope_scaling") or {})
    sliding = dict(named.get("sliding_attention") or {})
    settings = ({"rope_theta": full_base} | full, {"rope_theta": sliding_base} | sliding)
    ropes = [read_rope(config | {"rope_scaling": None, "rope_parameters": rope}, head_dim) for rope in settings]
    return ropes[0], ropes[1]


def sliding_layers(config: HfConfig, is_sliding: list[bool]) -> tuple[Layer, ...]:
    """Return layers with full or sliding-window attention, by `layer_types` in config.json.

    is_sliding: per layer, used without layer_types. Raises ValueError for other layer types, and for windows without a
    length.
    """
    types = ["sliding_attention" if sliding else "full_attention" for sliding in is_sliding]
    types, window = config.get("layer_types") or types, config.get("sliding_window", 4096)
    check_layer_types(config, types, {"full_attention", "sliding_attention"})
    if "sliding_attention" in types and not window:
        raise ValueError("config.json has layer_types with sliding_attention, and no sliding_window for their length")
    return tuple(Layer(window=window if kind == "sliding_attention" else None) for kind in types)


def qwen_layers(config: HfConfig) -> tuple[Layer, ...]:
    """Describe Qwen's layers: with use_sliding_window they have windows from layer max_window_layers on."""
    if not config.get("use_sliding_window"):
        config = config | {"sliding_window": None}
    window, first = config.get("sliding_window", 4096), config.get("max_window_layers", 28)
    return sliding_layers(config, [window is not None and i >= first for i in range(config["num_hidden_layers"])])


ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu2", "xielu")


def describe_decoder(
    config: HfConfig,
    transformer: TransformerArgs | None = None,
    *,
    partial_rotary: bool = False,
    interleaved: bool = False,
    **fields: Any,
) -> Architecture:
    """Return the architecture of a Llama-like decoder.

    transformer, fields: additional arguments of TransformerConfig and of Architecture.
    partial_rotary, interleaved: see `read_rope`.
    """
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = config["head_dim"] or config["hidden_size"] // heads
    activation, base = config["hidden_act"], config.get("rope_theta", 10000.0)
    if activation not in ACTIVATIONS:
        raise ValueError(f"config.json has hidden_act {activation!r}; supported are {', '.join(ACTIVATIONS)}")
    if "ropes" not in fields:
        fields["ropes"] = (read_rope(config, head_dim, base=base, partial=partial_rotary, interleaved=interleaved),)
    defaults = {
        "vocab_size": config["vocab_size"],
        "tied": config["tie_word_embeddings"],
        "max_positions": config["max_position_embeddings"],
        "layers": (Layer(),) * layers,
    }
    arguments = {
        "num_layers": layers,
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"] or heads,
        "kv_channels": head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "gated_linear_unit": True,
        "activation_func": "silu" if activation == "swish" else activation,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return Architecture(**{"transformer": arguments | (transformer or {}), **defaults, **fields})


ENDS = [
    ParamMapping("model.embed_tokens.weight", "embedding.word_embeddings.weight", VOCAB),
    ParamMapping("model.norm.weight", "decoder.final_layernorm.weight", REPLICATED),
    ParamMapping("lm_head.weight", "output_layer.weight", VOCAB),
]

PROJECTIONS = [
    layer_mapping("self_attn.{part}_proj.weight", "self_attention.linear_qkv.weight", QKV),
    layer_mapping("self_attn.o_proj.weight", "self_attention.linear_proj.weight", ROW),
]

NORMS = [
    layer_mapping("input_layernorm.weight", "input_layernorm.weight", REPLICATED),
    layer_mapping("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", REPLICATED),
]

NORM_BIASES = [
    ParamMapping("model.norm.bias", "decoder.final_layernorm.bias", REPLICATED),
    layer_mapping("input_layernorm.bias", "input_layernorm.bias", REPLICATED),
    layer_mapping("post_attention_layernorm.bias", "pre_mlp_layernorm.bias", REPLICATED),
]

ATTENTION = NORMS + PROJECTIONS

POST_NORMS = [
    layer_mapping("post_attention_layernorm.weight", "self_attn_bda.norm.weight", REPLICATED),
    layer_mapping("post_feedforward_layernorm.weight", "mlp_bda.norm.weight", REPLICATED),
]

QKV_BIAS = [layer_mapping("self_attn.{part}_proj.bias", "self_attention.linear_qkv.bias", QKV)]

OUTPUT_BIAS = [layer_mapping("self_attn.o_proj.bias", "self_attention.linear_proj.bias", REPLICATED)]

FUSED_MLP = [
    layer_mapping("mlp.gate_up_proj.weight", "mlp.linear_fc1.weight", FUSED_GATE_UP),
    layer_mapping("mlp.down_proj.weight", "mlp.linear_fc2.weight", ROW),
]

MLP_BIASES = [
    layer_mapping("mlp.{part}_proj.bias", "mlp.linear_fc1.bias", GATE_UP),
    layer_mapping("mlp.down_proj.bias", "mlp.linear_fc2.bias", REPLICATED),
]

QK_NORMS = [
    layer_mapping("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", REPLICATED),
    layer_mapping("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", REPLICATED),
]

ROTATED_QK_NORMS = [
    layer_mapping("self_attn.query_layernorm.weight", "self_attention.core_attention.q_layernorm.weight", REPLICATED),
    layer_mapping("self_attn.key_layernorm.weight", "self_attention.core_attention.k_layernorm.weight", REPLICATED),
]


def attention_biases(config: HfConfig) -> list[ParamMapping]:
    """Map the biases of the query, key, value and output projections, if attention_bias is set."""
    return QKV_BIAS + OUTPUT_BIAS if config["attention_bias"] else []


def mlp_biases(config: HfConfig) -> list[ParamMapping]:
    """Map the biases of dense MLPs, if mlp_bias is set."""
    return MLP_BIASES if config["mlp_bias"] else []


def mlp(layers: tuple[int, ...] | None = None, name: str = "mlp") -> list[ParamMapping]:
    """Map a dense gated MLP in `layers`, by default all; name: its name in the checkpoint."""
    return [
        layer_mapping(name + ".{part}_proj.weight", "mlp.linear_fc1.weight", GATE_UP, layers),
        layer_mapping(name + ".down_proj.weight", "mlp.linear_fc2.weight", ROW, layers),
    ]


def experts(layers: tuple[int, ...] | None = None) -> list[ParamMapping]:
    """Map a router and gated experts in `layers`, by default all."""
    return [
        layer_mapping("mlp.gate.weight", "mlp.router.weight", REPLICATED, layers),
        layer_mapping("mlp.experts.{expert}.{part}_proj.weight", "mlp.experts.linear_fc1.weight", GATE_UP, layers),
        layer_mapping("mlp.experts.{expert}.down_proj.weight", "mlp.experts.linear_fc2.weight", ROW, layers),
    ]


def shared_experts(name: str, layers: tuple[int, ...] | None = None, *, gate: bool = False) -> list[ParamMapping]:
    """Map the shared experts in `layers`, by default all: one gated MLP, called `name` in the checkpoint.

    gate: their output is weighted by a sigmoid gate.
    """
    shared = "mlp.shared_experts."
    mappings = [
        layer_mapping(name + ".{part}_proj.weight", shared + "linear_fc1.weight", GATE_UP, layers),
        layer_mapping(name + ".down_proj.weight", shared + "linear_fc2.weight", ROW, layers),
    ]
    return mappings + [layer_mapping(name + "_gate.weight", shared + "gate_weight", REPLICATED, layers)] * gate
