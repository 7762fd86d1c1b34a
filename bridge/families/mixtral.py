"""Mixtral: Mistral's attention, and experts with softmax routing in every layer."""

from ..mapping.architecture import Architecture, HfConfig, Layer
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, describe_decoder
from .softmax_moe import block_sparse_moe, softmax_routing


def architecture(config: HfConfig) -> Architecture:
    check_jitter(config)
    routing, rule = softmax_routing(config["num_local_experts"], config["num_experts_per_tok"], normalize=True)
    layers = (Layer(window=config.get("sliding_window")),) * config["num_hidden_layers"]
    transformer = {"moe_ffn_hidden_size": config["intermediate_size"]} | routing
    return describe_decoder(config, transformer, layers=layers, routing=rule)


def check_jitter(config: HfConfig) -> None:
    """Raise ValueError for router_jitter_noise."""
    if config.get("router_jitter_noise"):
        raise ValueError(
            f"config.json has router_jitter_noise {config['router_jitter_noise']}: noise on the experts' input in "
            "training is not supported. Set it to 0.0"
        )


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + block_sparse_moe()


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    models="Mixtral 8x7B, 8x22B",
    architecture=architecture,
    mappings=mappings,
    limits=("router_jitter_noise",),
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
    },
)
