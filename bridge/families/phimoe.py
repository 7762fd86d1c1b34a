"""Phi-MoE: attention with biases, LayerNorms, two experts by SparseMixer, LongRoPE, and a bias of the output layer.

Documents longer than the original length turn by LongRoPE's long factors, as in the models' own code and in vLLM.
transformers' class takes the short ones for all lengths, since it calls its rope function without a length.
"""

from ..mapping.architecture import Architecture, HfConfig, Layer, Routing
from ..mapping.param_mapping import VOCAB, Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, NORM_BIASES, attention_biases, check_supported, describe_decoder
from .softmax_moe import block_sparse_moe, softmax_routing


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"num_experts_per_tok": (2,)})
    transformer, _ = softmax_routing(config["num_local_experts"], 2, normalize=True)
    transformer |= {
        "moe_ffn_hidden_size": config["intermediate_size"],
        "normalization": "LayerNorm",
        "add_qkv_bias": config["attention_bias"],
    }
    return describe_decoder(
        config | {key: _read_scaling(key, config.get(key)) for key in ("rope_parameters", "rope_scaling")},
        transformer,
        layers=(Layer(window=config.get("sliding_window")),) * config["num_hidden_layers"],
        output_bias=config["attention_bias"],
        logits_bias=config["lm_head_bias"],
        routing=Routing(sparse_mixer=config["router_jitter_noise"]),
    )


def _read_scaling(key: str, settings: HfConfig | None) -> HfConfig | None:
    """Return LongRoPE with its factor on cosines and sines, which these files call short_mscale and long_mscale."""
    settings = dict(settings or {})
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return settings or None
    if kind not in ("longrope", "su"):
        raise ValueError(f"config.json has {key} of type {kind!r}; Phi-MoE is supported with default and longrope")
    mscale, long_mscale = settings.pop("short_mscale", None), settings.pop("long_mscale", None)
    if mscale is None or mscale != long_mscale:
        raise ValueError(
            f"config.json has short_mscale {mscale} and long_mscale {long_mscale}: supported are two equal numbers"
        )
    return settings | {"attention_factor": mscale}


def mappings(config: HfConfig) -> list[ParamMapping]:
    bias = [ParamMapping("lm_head.bias", "output_layer.bias", VOCAB)] if config["lm_head_bias"] else []
    return ENDS + bias + ATTENTION + NORM_BIASES + attention_biases(config) + block_sparse_moe()


FAMILY = Family(
    name="phimoe",
    architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    models="Phi-3.5-MoE, Phi-mini-MoE and Phi-tiny-MoE",
    architecture=architecture,
    mappings=mappings,
    limits=(
        "random experts (SparseMixer) and input_jitter_noise, which transformers has in training: experts and their "
        "weights are those of its evaluation",
        "long_mscale other than short_mscale; rope scaling other than longrope",
        "GKD, as student or teacher: the output layer has a bias",
    ),
    defaults=DEFAULTS
    | {
        "vocab_size": 32064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "attention_bias": False,
        "lm_head_bias": False,
    },
)
