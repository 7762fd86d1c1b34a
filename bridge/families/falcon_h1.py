"""Falcon-H1: attention and Mamba-2 of the same input in every layer, and a factor at each place that has one."""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Layer, Mamba
from ..mapping.param_mapping import REPLICATED, Family, ParamMapping
from . import mamba_hybrid
from .decoder import DEFAULTS, ENDS, PROJECTIONS, check_supported, describe_decoder, layer_mapping, mlp

SUPPORTED = {
    "hidden_act": ("silu", "swish"),
    **{f"{part}_bias": (False,) for part in ("attention", "mlp", "mamba_proj", "projectors")},
}


def _read_mamba(config: HfConfig) -> Mamba:
    width = config.get("mamba_d_ssm", 1024)  # null is not the default: the width follows from mamba_expand
    factors = [config["ssm_in_multiplier"] * factor for factor in config["ssm_multipliers"]]
    return mamba_hybrid.read_mamba(
        config,
        config["mamba_expand"] * config["hidden_size"] if width is None else width,
        has_norm=bool(config["mamba_rms_norm"]),
        multipliers=None if set(factors) == {1.0} else tuple(factors),
    )


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, SUPPORTED)
    if config["mamba_rms_norm"] and config["mamba_norm_before_gate"]:
        raise ValueError(
            "config.json has mamba_rms_norm and mamba_norm_before_gate, which transformers' kernels ignore in "
            "training; this family is supported with mamba_norm_before_gate false only"
        )
    gate, down = config["mlp_multipliers"]
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    entry = config["attention_in_multiplier"]  # on queries, keys and values
    return describe_decoder(
        config,
        {"softmax_scale": entry**2 * config["key_multiplier"] * head_dim**-0.5},
        layers=(Layer("attention_and_mamba"),) * config["num_hidden_layers"],
        mamba=_read_mamba(config),
        mixer_scales=(entry * config["attention_out_multiplier"], config["ssm_out_multiplier"]),
        embedding_scale=float(config["embedding_multiplier"]),
        logits_scale=1 / config["lm_head_multiplier"],
        gate_scale=gate,
        mlp_scale=down,
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    attention = [
        replace(mapping, mcore=mapping.mcore.replace("self_attention.", "self_attention.attention."))
        for mapping in PROJECTIONS
    ]
    mamba = [
        layer_mapping("mamba." + name, "self_attention.mamba." + name, kind)
        for name, kind in mamba_hybrid.mamba_kinds(_read_mamba(config))
    ]
    return [
        *(replace(mapping, hf=mapping.hf.replace("model.norm", "model.final_layernorm")) for mapping in ENDS),
        layer_mapping("input_layernorm.weight", "input_layernorm.weight", REPLICATED),
        layer_mapping("pre_ff_layernorm.weight", "pre_mlp_layernorm.weight", REPLICATED),
        *attention,
        *mamba,
        *mlp(name="feed_forward"),
    ]


FAMILY = Family(
    name="falcon_h1",
    architectures=("FalconH1ForCausalLM",),
    models="Falcon-H1 (0.5B to 34B)",
    architecture=architecture,
    mappings=mappings,
    limits=(
        "attention_bias, mlp_bias, mamba_proj_bias and projectors_bias",
        "mamba_norm_before_gate with mamba_rms_norm, which transformers' kernels ignore in training",
    ),
    defaults=DEFAULTS
    | mamba_hybrid.DEFAULTS
    | {
        "vocab_size": 128000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "projectors_bias": False,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "mlp_multipliers": (1.0, 1.0),
        "ssm_multipliers": (1.0,) * 5,
        **{
            f"{part}_multiplier": 1.0
            for part in ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
        },
    },
)
