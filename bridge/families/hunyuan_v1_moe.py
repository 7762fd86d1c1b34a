"""Hunyuan with experts: Hunyuan dense with a shared and routed experts in every layer, which have the same width."""

from ..mapping.architecture import Architecture, HfConfig, Routing
from ..mapping.param_mapping import REPLICATED, Family, ParamMapping
from .decoder import (
    ATTENTION,
    ENDS,
    ROTATED_QK_NORMS,
    attention_biases,
    describe_decoder,
    experts,
    layer_mapping,
    shared_experts,
)
from .hunyuan_v1_dense import HUNYUAN_DEFAULTS, grow_rope_base


def architecture(config: HfConfig) -> Architecture:
    bias, width = config["attention_bias"], config["intermediate_size"]
    for key, supported in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if (value := _only_value(config, key, supported)) != supported:
            raise ValueError(f"config.json has {key} {value!r}; transformers' class takes {supported} in its place")
    return describe_decoder(
        grow_rope_base(config),
        {
            "add_qkv_bias": bias,
            "qk_layernorm": True,
            "num_moe_experts": _only_value(config, "num_experts", 1),
            "moe_router_topk": _only_value(config, "moe_topk", 1),
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width,
        },
        output_bias=bias,
        qk_norm="rotated",
        routing=Routing(fp32=True),
    )


def _only_value(config: HfConfig, key: str, default: int) -> int:
    """Return a number that config.json may have for each layer; raises ValueError if layers differ."""
    value = config.get(key)
    if not isinstance(value, list):
        return default if value is None else value
    if len(set(value)) != 1:
        raise ValueError(f"config.json has {key} that differs between layers: {value}")
    return value[0]


def mappings(config: HfConfig) -> list[ParamMapping]:
    _, *routed = experts()
    every_layer = tuple(range(config["num_hidden_layers"]))
    return [
        *ENDS,
        *ATTENTION,
        *attention_biases(config),
        *ROTATED_QK_NORMS,
        layer_mapping("mlp.gate.wg.weight", "mlp.router.weight", REPLICATED, fp32=True),
        *routed,
        *shared_experts("mlp.shared_mlp", every_layer),
    ]


FAMILY = Family(
    name="hunyuan_v1_moe",
    architectures=("HunYuanMoEV1ForCausalLM",),
    models="Hunyuan-A13B",
    architecture=architecture,
    mappings=mappings,
    limits=("layers that differ in experts, shared experts or widths", "use_qk_norm false and use_cla true"),
    defaults=HUNYUAN_DEFAULTS | {"num_experts": 1, "moe_topk": 1},
)
