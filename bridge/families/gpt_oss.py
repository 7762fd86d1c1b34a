"""GPT-OSS: attention sinks and alternating windows, biases in all linear layers, experts with a clamped SwiGLU."""

from ..mapping.architecture import Architecture, HfConfig, Routing
from ..mapping.param_mapping import COLUMN, REPLICATED, ROW, Family, ParamMapping, ShardingKind, Span
from .decoder import ATTENTION, DEFAULTS, ENDS, attention_biases, describe_decoder, layer_mapping, sliding_layers
from .internvl import with_tower

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _alternating(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    """Lay out each rank's gate, then its up, from one tensor in which they alternate."""
    size = length // ranks
    return [Span(0, r * size + first, (r + 1) * size, step=2) for r in range(ranks) for first in (0, 1)]


ALTERNATING = ShardingKind(0, _alternating)
MOE = [
    layer_mapping("self_attn.sinks", "self_attention.core_attention.softmax_offset", COLUMN),
    layer_mapping("mlp.router.weight", "mlp.router.weight", REPLICATED),
    layer_mapping("mlp.router.bias", "mlp.router.bias", REPLICATED),
    layer_mapping(
        "mlp.experts.gate_up_proj", "mlp.experts.linear_fc1.weight", ALTERNATING, stacked=True, transposed=True
    ),
    layer_mapping("mlp.experts.gate_up_proj_bias", "mlp.experts.linear_fc1.bias", ALTERNATING, stacked=True),
    layer_mapping("mlp.experts.down_proj", "mlp.experts.linear_fc2.weight", ROW, stacked=True, transposed=True),
    layer_mapping("mlp.experts.down_proj_bias", "mlp.experts.linear_fc2.bias", REPLICATED, stacked=True),
]


def architecture(config: HfConfig) -> Architecture:
    bias = config["attention_bias"]
    transformer = {
        "add_qkv_bias": bias,
        "num_moe_experts": config["num_local_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": config["intermediate_size"],
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": config["swiglu_limit"],
        "glu_linear_offset": 1.0,
    }
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = config | {"rope_scaling": YARN}
    return describe_decoder(
        config,
        transformer,
        layers=sliding_layers(config, [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]),
        output_bias=bias,
        sinks=True,
        expert_bias=True,
        routing=Routing(logit_bias=True),
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + attention_biases(config) + MOE


TEXT_FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    models="gpt-oss-20b, gpt-oss-120b; InternVL 3.5 (GPT-OSS-20B-A4B)",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
)
FAMILY = with_tower(TEXT_FAMILY)
