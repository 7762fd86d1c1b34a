"""K-EXAONE: EXAONE 4's attention behind norms, and DeepSeek-V3's experts."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from . import exaone4
from .decoder import ATTENTION, ENDS, QK_NORMS, describe_decoder
from .deepseek_moe import LIMITS, count_dense_layers, feed_forward, moe_layers, score_bias, sigmoid_routing


def architecture(config: HfConfig) -> Architecture:
    routing, rule = sigmoid_routing(_with_deepseek_keys(config))
    layers = exaone4.window_layers(config)
    return describe_decoder(config, {"qk_layernorm": True} | routing, layers=layers, routing=rule, passthrough=r"mtp\.")


def _with_deepseek_keys(config: HfConfig) -> HfConfig:
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    types = config.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (layers - dense)
    config = config | {"mlp_layer_types": types, "first_k_dense_replace": None}
    experts = {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    return count_dense_layers(config) | experts


def mappings(config: HfConfig) -> list[ParamMapping]:
    config = _with_deepseek_keys(config)
    bias = score_bias("mlp.e_score_correction_bias", tuple(moe_layers(config)))
    return [*ENDS, *ATTENTION, *QK_NORMS, *feed_forward(config, bias=False), bias]


FAMILY = Family(
    name="exaone_moe",
    architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    models="K-EXAONE 236B-A23B",
    architecture=architecture,
    mappings=mappings,
    limits=("sparse layers before dense ones", *exaone4.FAMILY.limits, *LIMITS),
    defaults=exaone4.FAMILY.defaults
    | {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
)
