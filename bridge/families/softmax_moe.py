"""Softmax routing over all experts, and the mappings of Mixtral's experts."""

from dataclasses import replace

from ..mapping.architecture import Routing, TransformerArgs
from ..mapping.param_mapping import GATE_UP, REPLICATED, ROW, ParamMapping
from .decoder import layer_mapping

MIXTRAL_GATES = replace(GATE_UP, parts=("w1", "w3"))


def softmax_routing(experts: int, topk: int, *, normalize: bool) -> tuple[TransformerArgs, Routing | None]:
    """Return megatron-core's settings of the router, and a `Routing` if these cannot express it.

    normalize: normalize the weights of a token's experts to sum to 1.
    """
    arguments = {"num_moe_experts": experts, "moe_router_topk": topk, "moe_router_score_function": "softmax"}
    if normalize and topk == 1:  # the weight is always 1, which megatron-core rejects
        return arguments | {"moe_router_pre_softmax": True}, Routing()
    # Softmax over the chosen experts equals softmax over all, divided by the sum of the chosen.
    return arguments | {"moe_router_pre_softmax": not normalize}, None


def block_sparse_moe(*, fp32: bool = False) -> list[ParamMapping]:
    """Map a router and experts in all layers, by Mixtral's names; fp32: the router's weight is in fp32."""
    hf, mcore = "block_sparse_moe.", "mlp."
    return [
        layer_mapping(hf + "gate.weight", mcore + "router.weight", REPLICATED, fp32=fp32),
        layer_mapping(hf + "experts.{expert}.{part}.weight", mcore + "experts.linear_fc1.weight", MIXTRAL_GATES),
        layer_mapping(hf + "experts.{expert}.w2.weight", mcore + "experts.linear_fc2.weight", ROW),
    ]
