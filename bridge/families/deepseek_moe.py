"""DeepSeek's mixture of experts: dense first layers, shared experts, and group-limited routing.

Several families route as DeepSeek-V3 does (https://arxiv.org/abs/2412.19437, section 2.1.2): by sigmoid scores, with a
bias that affects only the choice of experts.
"""

from collections.abc import Callable

from ..mapping.architecture import HfConfig, Routing, TransformerArgs
from ..mapping.param_mapping import REPLICATED, ParamMapping
from .decoder import check_supported, dense_layers, experts, layer_mapping, mlp, prediction_layer, shared_experts


def moe_arguments(config: HfConfig) -> TransformerArgs:
    """Return megatron-core's settings for sizes and layers of experts."""
    shared, moe = config["n_shared_experts"], moe_layers(config)
    return {
        "num_moe_experts": config["n_routed_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * shared if shared else None,
        "moe_layer_freq": [int(layer in moe) for layer in range(config["num_hidden_layers"])],
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
    }


def moe_layers(config: HfConfig) -> range:
    return range(min(config["first_k_dense_replace"], config["num_hidden_layers"]), config["num_hidden_layers"])


def count_dense_layers(config: HfConfig) -> HfConfig:
    """Return `config` with the number of dense first layers that `mlp_layer_types` has, by default 1.

    Raises ValueError for other orders of layers, and if first_k_dense_replace says otherwise: transformers ignores it.
    """
    layers = config["num_hidden_layers"]
    types = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ValueError(
            f"config.json has mlp_layer_types {types}: this family is supported with dense layers first, then sparse "
            f"ones, {layers} in all"
        )
    if config.get("first_k_dense_replace") not in (None, dense):
        raise ValueError(
            f"config.json has first_k_dense_replace {config['first_k_dense_replace']}, which transformers' class "
            f"ignores, and {dense} dense layers in mlp_layer_types (by default 1): make them agree"
        )
    return config | {"first_k_dense_replace": dense}


def mtp_pattern(config: HfConfig, depths: int | None = None) -> str:
    """Return a regex for tensors of multi-token prediction layers, which follow the model's layers."""
    first = config["num_hidden_layers"]
    numbers = "|".join(str(first + depth) for depth in range(_count_depths(config) if depths is None else depths))
    return rf"model\.layers\.(?:{numbers})\." if numbers else ""


def _count_depths(config: HfConfig) -> int:
    return next((config[key] for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in config), 1) or 0


def mtp_mappings(
    mappings: Callable[[HfConfig], list[ParamMapping]], config: HfConfig, depths: int
) -> list[ParamMapping]:
    """Map the first `depths` layers of multi-token prediction: as the model's last layer, plus their own tensors.

    Their copies of embedding and output layer are not loaded; they pass through unchanged.
    """
    if depths > (stored := _count_depths(config)):
        raise ValueError(f"--mtp_num_layers {depths}: config.json has num_nextn_predict_layers {stored}")
    last, mtp = config["num_hidden_layers"] - 1, []
    for depth in range(depths):
        hf = f"model.layers.{last + 1 + depth}."
        names = {name: hf + name for name in ("eh_proj", "enorm", "hnorm")}
        names["final_layernorm"] = hf + "shared_head.norm"
        mtp += prediction_layer(mappings(config), last, depth, hf, names)
    return mtp


def group_arguments(config: HfConfig) -> TransformerArgs:
    """Return megatron-core's settings for group-limited routing; empty if all groups may be chosen.

    Raises ValueError if the groups are unequal, or the chosen groups have too few experts.
    """
    groups, topk_groups, num_experts = config["n_group"], config["topk_group"], config["n_routed_experts"]
    if not groups or groups == 1 or groups == topk_groups:
        return {}
    if not topk_groups or num_experts % groups or topk_groups * (num_experts // groups) < config["num_experts_per_tok"]:
        raise ValueError(
            f"config.json has n_group {groups}, topk_group {topk_groups}, n_routed_experts {num_experts} and "
            f"num_experts_per_tok {config['num_experts_per_tok']}: groups must be equal, and the chosen ones hold "
            "enough experts"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": topk_groups}


SUPPORTED = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
LIMITS = ("scoring_func other than sigmoid", "topk_method other than noaux_tc")


def sigmoid_routing(config: HfConfig) -> tuple[TransformerArgs, Routing | None]:
    """Return DeepSeek-V3's routing as megatron-core's settings, and a `Routing` if these cannot express it.

    Raises ValueError for other score functions and top-k methods.
    """
    check_supported(config, SUPPORTED)
    arguments = {
        **moe_arguments(config),
        **group_arguments(config),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    topk, normalize = config["num_experts_per_tok"], bool(config["norm_topk_prob"])
    # megatron-core scores a group by its best topk / topk_group experts, and does not normalize for topk 1.
    topk_groups = arguments.get("moe_router_group_topk")
    if (topk_groups is None or topk // topk_groups == 2) and topk > 1 and normalize:
        return arguments, None
    return arguments, Routing(group_members=2, normalize=normalize)


def feed_forward(config: HfConfig, *, bias: bool) -> list[ParamMapping]:
    """Map the MLP of dense layers and the experts of the others; bias: with a bias on the router's scores."""
    moe = tuple(moe_layers(config))
    mappings = mlp(dense_layers(config, moe)) + experts(moe)
    if config["n_shared_experts"]:
        mappings += shared_experts("mlp.shared_experts", moe)
    if bias:
        mappings.append(score_bias("mlp.gate.e_score_correction_bias", moe))
    return mappings


def score_bias(hf: str, layers: tuple[int, ...] | None = None) -> ParamMapping:
    """Map the bias on the router's scores."""
    return layer_mapping(hf, "mlp.router.expert_bias", REPLICATED, layers, fp32=True)
