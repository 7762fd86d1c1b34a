"""Nemotron-H and Nemotron 3: each layer is a Mamba-2 layer, attention without positions, an MLP, or experts.

Time steps have the bounds of config.json's time_step_limit, as in the models' training and in vLLM. transformers takes
its time_step_min, with which time steps are initialized, as their lower bound.
"""

import math

from ..mapping.architecture import Architecture, HfConfig, Layer, Mamba
from ..mapping.param_mapping import COLUMN, QKV, REPLICATED, ROW, VOCAB, Family, ParamMapping, ShardingKind
from .decoder import DEFAULTS, LAYER, check_layer_types, check_supported, describe_decoder
from .deepseek_moe import LIMITS, sigmoid_routing
from .mamba_hybrid import mamba_kinds, read_time_limits

MIXERS = {"linear_attention": "mamba", "full_attention": "attention", "mlp": "none", "moe": "none"}
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
RENAMED = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_limit": "time_step_limit"}
RENAMED |= {"mamba_conv_bias": "use_conv_bias"}
SUPPORTED = {
    "attention_bias": (False,),
    "mamba_hidden_act": ("silu", "swish"),
    "mamba_proj_bias": (False,),
    "mlp_bias": (False,),
    "n_shared_experts": (1,),
    "residual_in_fp32": (False,),
    "sliding_window": (),
    "tie_word_embeddings": (False,),
    "use_bias": (False,),
}


def _read_layers(config: HfConfig) -> HfConfig:
    """Return `config` with the types of its layers as `layer_types`, and their number, for which they go first."""
    types = config.get("layers_block_type") or config.get("layer_types")
    if types is None:
        types = [LETTERS.get(letter, letter) for letter in config.get("hybrid_override_pattern") or "ME*-"]
    types = [OLDER_NAMES.get(kind, kind) for kind in types]
    config = config | {"layer_types": types, "num_hidden_layers": len(types)}
    check_layer_types(config, types, set(MIXERS))
    return config | {name: config[older] for older, name in RENAMED.items() if config.get(older) is not None}


def _layers_of(config: HfConfig, *kinds: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(config["layer_types"]) if kind in kinds)


def _read_mamba(config: HfConfig) -> Mamba:
    heads, groups = config["mamba_num_heads"], config["n_groups"]
    if heads % groups:
        raise ValueError(f"config.json has mamba_num_heads {heads} and n_groups {groups}: the second must divide")
    return Mamba(
        heads=heads,
        head_dim=config["mamba_head_dim"],
        groups=groups,
        state_dim=config["ssm_state_size"],
        kernel=config["conv_kernel"],
        conv_bias=config["use_conv_bias"],
        dt_limits=read_time_limits(config),
    )


def architecture(config: HfConfig) -> Architecture:
    config = _read_layers(config)
    check_supported(config, SUPPORTED)
    types, moe = config["layer_types"], _layers_of(config, "moe")
    transformer, routing = {}, None
    if moe:
        transformer, routing = sigmoid_routing(config | {"first_k_dense_replace": 0})
        transformer |= {
            "moe_layer_freq": [int(layer in moe) for layer in range(len(types))],
            "moe_shared_expert_intermediate_size": config["moe_shared_expert_intermediate_size"],
        }
    return describe_decoder(
        config | {"hidden_act": config["mlp_hidden_act"], "rms_norm_eps": config["layer_norm_epsilon"]},
        transformer | {"gated_linear_unit": False},
        ropes=(),
        layers=tuple(Layer(MIXERS[kind], rope=None, has_mlp=kind in ("mlp", "moe")) for kind in types),
        mamba=_read_mamba(config),
        routing=routing,
        expert_latent=config.get("moe_latent_size") if moe else None,
        passthrough=r"mtp\.",
        module_names=((r"^backbone\.", "model."),),
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    config = _read_layers(config)
    mamba, attention, mlp, moe = (_layers_of(config, kind) for kind in MIXERS)
    latent_projections = ("fc1_latent_proj", "fc2_latent_proj") if config.get("moe_latent_size") else ()
    rows: list[tuple[str, str, ShardingKind, tuple[int, ...]]] = [
        ("norm.weight", "input_layernorm.weight", REPLICATED, mamba + attention),
        ("norm.weight", "pre_mlp_layernorm.weight", REPLICATED, mlp + moe),
        *(("mixer." + name, "self_attention." + name, kind, mamba) for name, kind in mamba_kinds(_read_mamba(config))),
        ("mixer.{part}_proj.weight", "self_attention.linear_qkv.weight", QKV, attention),
        ("mixer.o_proj.weight", "self_attention.linear_proj.weight", ROW, attention),
        ("mixer.up_proj.weight", "mlp.linear_fc1.weight", COLUMN, mlp),
        ("mixer.down_proj.weight", "mlp.linear_fc2.weight", ROW, mlp),
        ("mixer.gate.weight", "mlp.router.weight", REPLICATED, moe),
        ("mixer.experts.{expert}.up_proj.weight", "mlp.experts.linear_fc1.weight", COLUMN, moe),
        ("mixer.experts.{expert}.down_proj.weight", "mlp.experts.linear_fc2.weight", ROW, moe),
        *((f"mixer.{name}.weight", f"mlp.{name}.weight", REPLICATED, moe) for name in latent_projections),
        ("mixer.shared_experts.up_proj.weight", "mlp.shared_experts.linear_fc1.weight", COLUMN, moe),
        ("mixer.shared_experts.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", ROW, moe),
    ]
    bias = ParamMapping(
        "backbone.layers.{layer}.mixer.gate.e_score_correction_bias", LAYER + "mlp.router.expert_bias", REPLICATED, moe,
        fp32=True,
    )  # fmt: skip
    return [
        ParamMapping("backbone.embeddings.weight", "embedding.word_embeddings.weight", VOCAB),
        ParamMapping("backbone.norm_f.weight", "decoder.final_layernorm.weight", REPLICATED),
        ParamMapping("lm_head.weight", "output_layer.weight", VOCAB),
        *(ParamMapping("backbone.layers.{layer}." + hf, LAYER + mcore, kind, to) for hf, mcore, kind, to in rows),
        bias,
    ]


FAMILY = Family(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super",
    architecture=architecture,
    mappings=mappings,
    limits=(
        "attention_bias, mlp_bias, mamba_proj_bias and use_bias",
        "residual_in_fp32, sliding_window and tie_word_embeddings, which transformers' class ignores",
        *LIMITS,
    ),
    defaults=DEFAULTS
    | {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_limit": (0.0, math.inf),
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
)
