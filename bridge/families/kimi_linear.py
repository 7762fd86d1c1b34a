"""Kimi-Linear: Kimi delta attention, with latent attention without positions in between, and DeepSeek-V3's experts."""

from dataclasses import replace
from functools import partial

from ..mapping.architecture import Architecture, HfConfig, KimiDelta, Layer
from ..mapping.param_mapping import COLUMN, REPLICATED, ROW, Family, ParamMapping, ShardingKind, Span
from .decoder import (
    DEFAULTS,
    ENDS,
    NORMS,
    check_layer_types,
    check_supported,
    dense_layers,
    layer_mapping,
    mlp,
    shared_experts,
)
from .deepseek_moe import LIMITS, count_dense_layers, moe_layers, score_bias, sigmoid_routing
from .deepseek_v2 import describe_latent, latent_attention
from .softmax_moe import MIXTRAL_GATES

MIXERS = {"linear_attention": "kimi_delta", "full_attention": "attention"}
# Names in published files, where transformers' class has DeepSeek-V3's.
RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
DELTA_NAMES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
SUPPORTED = {
    "hidden_act": ("silu", "swish"),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "num_nextn_predict_layers": (0,),
}


def _read(config: HfConfig) -> HfConfig:
    """Return `config` by DeepSeek-V3's names, with the kinds of the layers as `layer_types`."""
    check_supported(config, SUPPORTED)
    config = config | {name: config[other] for other, name in RENAMED.items() if config.get(other) is not None}
    delta = config.get("linear_attn_config") or {}
    config |= {name: delta[other] for other, name in DELTA_NAMES.items() if delta.get(other) is not None}
    layers = range(config["num_hidden_layers"])
    full = {at - 1 for at in delta.get("full_attn_layers") or ()} if delta else set(layers[4::4])
    types = config.get("layer_types") or ["full_attention" if at in full else "linear_attention" for at in layers]
    check_layer_types(config, types, set(MIXERS))
    first = config.get("first_k_dense_replace", 1)
    kinds = config.get("mlp_layer_types") or ["dense" if at < first else "sparse" for at in layers]
    return count_dense_layers(config | {"mlp_layer_types": kinds, "first_k_dense_replace": None}) | {
        "layer_types": types
    }


def architecture(config: HfConfig) -> Architecture:
    config = _read(config)
    routing, rule = sigmoid_routing(config)
    about = describe_latent(config | {"rope_scaling": None}, routing, interleaved=False, routing=rule)
    return replace(
        about,
        ropes=(),
        layers=tuple(Layer(MIXERS[kind], rope=None) for kind in config["layer_types"]),
        kimi_delta=KimiDelta(config["linear_num_heads"], config["linear_head_dim"], config["linear_conv_kernel_dim"]),
        module_names=(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.self_attn\.(f_[ab]_proj)", r".self_attn.forget_gate.\1"),
        ),
    )


def _lay_out_heads(length: int, ranks: int, architecture: Architecture, *, has_beta: bool) -> list[Span]:
    """Lay out each head's query, key and value, and its beta."""
    assert architecture.kimi_delta is not None
    heads, dim, _ = architecture.kimi_delta
    sizes = (dim, dim, dim, 1) if has_beta else (dim, dim, dim)
    return [Span(part, head * size, (head + 1) * size) for head in range(heads) for part, size in enumerate(sizes)]


PROJECTED = ShardingKind(0, partial(_lay_out_heads, has_beta=True), ("q", "k", "v", "b"))
CONVOLVED = ShardingKind(0, partial(_lay_out_heads, has_beta=False), ("q", "k", "v"))
RATES = replace(COLUMN, dim=2)


def mappings(config: HfConfig) -> list[ParamMapping]:
    config = _read(config)
    delta, full = (tuple(at for at, each in enumerate(config["layer_types"]) if each == kind) for kind in MIXERS)
    moe = tuple(moe_layers(config))
    latent = [replace(mapping, layers=full) for mapping in latent_attention(config) if mapping not in NORMS]
    hf, mcore, experts = "self_attn.", "self_attention.", "block_sparse_moe."
    return [
        *ENDS,
        *NORMS,
        *latent,
        layer_mapping(hf + "{part}_proj.weight", mcore + "in_proj.weight", PROJECTED, delta),
        layer_mapping(hf + "{part}_conv1d.weight", mcore + "conv1d.weight", CONVOLVED, delta),
        layer_mapping(hf + "f_a_proj.weight", mcore + "decay_down.weight", REPLICATED, delta),
        layer_mapping(hf + "f_b_proj.weight", mcore + "decay_up.weight", COLUMN, delta),
        layer_mapping(hf + "g_a_proj.weight", mcore + "gate_down.weight", REPLICATED, delta),
        layer_mapping(hf + "g_b_proj.weight", mcore + "gate_up.weight", COLUMN, delta),
        layer_mapping(hf + "A_log", mcore + "A_log", RATES, delta, fp32=True),
        layer_mapping(hf + "dt_bias", mcore + "dt_bias", COLUMN, delta, fp32=True),
        layer_mapping(hf + "o_norm.weight", mcore + "norm.weight", REPLICATED, delta),
        layer_mapping(hf + "o_proj.weight", mcore + "out_proj.weight", ROW, delta),
        *mlp(dense_layers(config, moe)),
        *mlp(dense_layers(config, moe), "block_sparse_moe"),  # as transformers saves them
        layer_mapping(experts + "gate.weight", "mlp.router.weight", REPLICATED, moe),
        layer_mapping(experts + "experts.{expert}.{part}.weight", "mlp.experts.linear_fc1.weight", MIXTRAL_GATES, moe),
        layer_mapping(experts + "experts.{expert}.w2.weight", "mlp.experts.linear_fc2.weight", ROW, moe),
        *shared_experts(experts + "shared_experts", moe),
        score_bias(experts + "gate.e_score_correction_bias", moe),
    ]


FAMILY = Family(
    name="kimi_linear",
    architectures=("KimiLinearForCausalLM",),
    models="Kimi-Linear-48B-A3B",
    architecture=architecture,
    mappings=mappings,
    limits=("attention_bias", "mla_use_nope false and num_nextn_predict_layers", *LIMITS),
    defaults=DEFAULTS
    | {
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
)
