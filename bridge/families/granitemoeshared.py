"""Granite with experts and a shared expert."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import FUSED_GATE_UP, ROW, Family, ParamMapping
from . import granitemoe
from .decoder import layer_mapping


def architecture(config: HfConfig) -> Architecture:
    width = config["shared_intermediate_size"]
    return granitemoe.architecture(config, moe_shared_expert_intermediate_size=width or None)


SHARED = [
    layer_mapping("shared_mlp.input_linear.weight", "mlp.shared_experts.linear_fc1.weight", FUSED_GATE_UP),
    layer_mapping("shared_mlp.output_linear.weight", "mlp.shared_experts.linear_fc2.weight", ROW),
]


def mappings(config: HfConfig) -> list[ParamMapping]:
    return granitemoe.mappings(config) + (SHARED if config["shared_intermediate_size"] else [])


FAMILY = Family(
    name="granitemoeshared",
    architectures=("GraniteMoeSharedForCausalLM",),
    models="Granite MoE 7B-A1B with a shared expert",
    architecture=architecture,
    mappings=mappings,
    defaults=granitemoe.FAMILY.defaults | {"shared_intermediate_size": 0},
)
