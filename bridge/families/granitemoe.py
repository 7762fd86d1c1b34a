"""Granite with experts: Granite's scaling factors, and experts whose matrices are stacked, in every layer."""

from typing import Any

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import FUSED_GATE_UP, REPLICATED, ROW, Family, ParamMapping
from . import granite
from .decoder import ATTENTION, ENDS, attention_biases, layer_mapping
from .softmax_moe import softmax_routing


def architecture(config: HfConfig, **settings: Any) -> Architecture:
    """Return the architecture. settings: additional arguments of TransformerConfig."""
    routing, rule = softmax_routing(config["num_local_experts"], config["num_experts_per_tok"], normalize=True)
    experts = {"moe_ffn_hidden_size": config["intermediate_size"]} | routing | settings
    return granite.architecture(config, experts, routing=rule, module_names=MODULES)


MODULES = (  # names of transformers' parameters, which files do not have
    (r"block_sparse_moe\.input_linear\.weight$", "block_sparse_moe.experts.gate_up_proj"),
    (r"block_sparse_moe\.output_linear\.weight$", "block_sparse_moe.experts.down_proj"),
)
EXPERTS = [
    layer_mapping("block_sparse_moe.router.layer.weight", "mlp.router.weight", REPLICATED),
    layer_mapping("block_sparse_moe.input_linear.weight", "mlp.experts.linear_fc1.weight", FUSED_GATE_UP, stacked=True),
    layer_mapping("block_sparse_moe.output_linear.weight", "mlp.experts.linear_fc2.weight", ROW, stacked=True),
]


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + attention_biases(config) + EXPERTS


FAMILY = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    models="Granite 3.0 and 3.1 (1B-A400M, 3B-A800M)",
    architecture=architecture,
    mappings=mappings,
    defaults=granite.FAMILY.defaults | {"num_local_experts": 8, "num_experts_per_tok": 2},
)
