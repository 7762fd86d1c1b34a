"""Experts behind a softmax over all of them, as most families have it, and the names of Mixtral's experts."""

from dataclasses import replace
from typing import Any

from ..mapping.param_mapping import GATE_UP, REPLICATED, ROW, Routing, Row
from .decoder import HF_LAYER, LAYER

_MIXTRAL = replace(GATE_UP, parts=("w1", "w3"))


def softmax_routing(experts: int, topk: int, *, normalize: bool) -> tuple[dict[str, Any], Routing | None]:
    """megatron-core's settings of the router, and the rule where these do not say it.

    `normalize`: the weights of a token's experts are made to sum up to 1.
    """
    given = {"num_moe_experts": experts, "moe_router_topk": topk, "moe_router_score_function": "softmax"}
    if normalize and topk == 1:  # its weight is always 1, which megatron-core refuses
        return given | {"moe_router_pre_softmax": True}, Routing()
    # Softmax over the chosen experts equals softmax over all, divided by the sum of the chosen.
    return given | {"moe_router_pre_softmax": not normalize}, None


def block_sparse_moe(*, fp32: bool = False) -> list[Row]:
    """A router and experts in all layers, by Mixtral's names; `fp32`: the router's matrix is."""
    hf, mcore = HF_LAYER + "block_sparse_moe.", LAYER + "mlp."
    return [
        Row(hf + "gate.weight", mcore + "router.weight", REPLICATED, fp32=fp32),
        Row(hf + "experts.{expert}.{part}.weight", mcore + "experts.linear_fc1.weight", _MIXTRAL),
        Row(hf + "experts.{expert}.w2.weight", mcore + "experts.linear_fc2.weight", ROW),
    ]
