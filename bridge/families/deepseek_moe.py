"""Experts as DeepSeek has them: the first layers dense, a few experts for every token, the others chosen by groups.

DeepSeek-V3's way of choosing (https://arxiv.org/abs/2412.19437, section 2.1.2) is that of several families: sigmoid
scores, and a bias on them that has a part in the choice alone.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import REPLICATED, Routing, Row
from .decoder import HF_LAYER, LAYER, check_known, dense_layers, experts, mlp, shared_experts


def moe_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """What megatron-core's TransformerConfig has to know of the experts' sizes and places."""
    shared = settings["n_shared_experts"]
    return {
        "num_moe_experts": settings["n_routed_experts"],
        "moe_router_topk": settings["num_experts_per_tok"],
        "moe_ffn_hidden_size": settings["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": settings["moe_intermediate_size"] * shared if shared else None,
        "moe_layer_freq": [int(layer in moe_layers(settings)) for layer in range(settings["num_hidden_layers"])],
        "moe_router_topk_scaling_factor": float(settings["routed_scaling_factor"]),
    }


def predicting_layers(config: dict[str, Any], settings: dict[str, Any]) -> str:
    """A pattern of the names of what predicts further tokens: layers after those of the model."""
    first = settings["num_hidden_layers"]
    numbers = "|".join(str(first + depth) for depth in range(_depths(config)))
    return rf"model\.layers\.(?:{numbers})\." if numbers else ""


def _depths(config: dict[str, Any]) -> int:
    return next((config[key] for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in config), 1) or 0


def predicting_rows(
    rows: Callable[[dict[str, Any]], list[Row]], layers: int, config: dict[str, Any], depths: int
) -> list[Row]:
    """The first `depths` of these layers: what a family's `rows` have in the model's last layer, and their own.

    `layers`: how many the model has where config.json does not say it.

    Their copies of the embedding and of the output matrix are not read, and go along as they are.
    """
    if depths > (there := _depths(config)):
        raise ValueError(f"--mtp_num_layers {depths}: config.json has num_nextn_predict_layers {there}")
    last, found = (config.get("num_hidden_layers") or layers) - 1, []
    for depth in range(depths):
        hf, mcore = f"model.layers.{last + 1 + depth}.", "mtp.layers.{layer}."
        for row in rows(config):
            if LAYER in row.mcore and (row.layers is None or last in row.layers):
                inside = row.mcore.replace(LAYER, mcore + "mtp_model_layer.")
                found.append(replace(row, hf=row.hf.replace(HF_LAYER, hf), mcore=inside, layers=(depth,)))
        own = (("eh_proj",) * 2, ("enorm",) * 2, ("hnorm",) * 2, ("shared_head.norm", "final_layernorm"))
        found += [Row(f"{hf}{a}.weight", f"{mcore}{b}.weight", REPLICATED, (depth,)) for a, b in own]
    return found


def moe_layers(settings: dict[str, Any]) -> range:
    return range(min(settings["first_k_dense_replace"], settings["num_hidden_layers"]), settings["num_hidden_layers"])


def groups(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a choice by groups; none where one group holds all experts, or all groups may be chosen.

    Raises ValueError where the groups cannot be made, or hold too few experts for the choice.
    """
    number, chosen, experts_ = settings["n_group"], settings["topk_group"], settings["n_routed_experts"]
    if not number or number == 1 or number == chosen:
        return {}
    if not chosen or experts_ % number or chosen * (experts_ // number) < settings["num_experts_per_tok"]:
        raise ValueError(
            f"config.json has n_group {number}, topk_group {chosen}, n_routed_experts {experts_} and "
            f"num_experts_per_tok {settings['num_experts_per_tok']}: groups must be equal, and the chosen ones hold "
            "enough experts"
        )
    return {"moe_router_num_groups": number, "moe_router_group_topk": chosen}


KNOWN = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}


def sigmoid_routing(config: dict[str, Any], settings: dict[str, Any]) -> tuple[dict[str, Any], Routing | None]:
    """DeepSeek-V3's routing: megatron-core's settings, and the rule where these do not say it.

    Raises ValueError for another way of scoring or choosing.
    """
    check_known(config, KNOWN)
    given = {
        **moe_settings(settings),
        **groups(settings),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    topk = settings["num_experts_per_tok"]
    # megatron-core takes the best topk / topk_group of a group, and leaves a single expert's weight as it is.
    as_megatron = topk // given.get("moe_router_group_topk", topk) == 2 if "moe_router_group_topk" in given else True
    if as_megatron and topk > 1 and settings["norm_topk_prob"]:
        return given, None
    return given, Routing(group_members=2, normalize=bool(settings["norm_topk_prob"]))


def feed_forward(settings: dict[str, Any], *, bias: bool) -> list[Row]:
    """The dense layers' MLP and the others' experts; `bias`: with a bias on the experts' scores."""
    moe = tuple(moe_layers(settings))
    rows = mlp(dense_layers(settings, moe)) + experts(moe)
    if settings["n_shared_experts"]:
        rows += shared_experts("shared_experts", moe)
    if bias:
        scores = LAYER + "mlp.router.expert_bias"
        rows.append(Row(HF_LAYER + "mlp.gate.e_score_correction_bias", scores, REPLICATED, moe, fp32=True))
    return rows
