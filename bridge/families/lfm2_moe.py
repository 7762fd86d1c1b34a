"""LFM2 with experts: dense layers first, then experts with DeepSeek-V3's routing.

transformers adds 1e-6 to the sum of a token's weights before it divides by it, which changes them by a millionth.
"""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import REPLICATED, ROW, Family, ParamMapping
from .decoder import dense_layers, layer_mapping
from .deepseek_moe import moe_layers, score_bias, sigmoid_routing
from .lfm2 import FAMILY as DENSE
from .lfm2 import dense_mlp, describe_convolutional, mixers
from .softmax_moe import MIXTRAL_GATES


def _with_deepseek_keys(config: HfConfig) -> HfConfig:
    return config | {
        "first_k_dense_replace": config["num_dense_layers"],
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": 0,
        "n_group": 1,
        "topk_group": 1,
    }


def architecture(config: HfConfig) -> Architecture:
    routing, rule = sigmoid_routing(_with_deepseek_keys(config))
    routing["moe_router_enable_expert_bias"] = bool(config["use_expert_bias"])
    return describe_convolutional(config, routing, routing=rule)


def mappings(config: HfConfig) -> list[ParamMapping]:
    moe = tuple(moe_layers(_with_deepseek_keys(config)))
    hf, mcore = "feed_forward.", "mlp."
    return [
        *mixers(config),
        *dense_mlp(dense_layers(config, moe)),
        layer_mapping(hf + "gate.weight", mcore + "router.weight", REPLICATED, moe),
        layer_mapping(hf + "experts.{expert}.{part}.weight", mcore + "experts.linear_fc1.weight", MIXTRAL_GATES, moe),
        layer_mapping(hf + "experts.{expert}.w2.weight", mcore + "experts.linear_fc2.weight", ROW, moe),
        *([score_bias(hf + "expert_bias", moe)] if config["use_expert_bias"] else []),
    ]


FAMILY = Family(
    name="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM",),
    models="LFM2-8B-A1B",
    architecture=architecture,
    mappings=mappings,
    limits=DENSE.limits,
    defaults=DENSE.defaults
    | {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "num_experts": 32,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
)
