"""Hunyuan dense: Llama's layers, with a norm per query and key head behind the rope, whose base grows by `alpha`."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import (
    ATTENTION,
    DEFAULTS,
    ENDS,
    ROTATED_QK_NORMS,
    attention_biases,
    check_supported,
    describe_decoder,
    mlp,
)


def architecture(config: HfConfig) -> Architecture:
    bias = config["attention_bias"]
    attention = {"add_qkv_bias": bias, "qk_layernorm": True}
    return describe_decoder(grow_rope_base(config), attention, output_bias=bias, qk_norm="rotated")


def grow_rope_base(config: HfConfig) -> HfConfig:
    """Return `config` with a plain rope in place of one of type dynamic with `alpha`, whose base is constant too.

    Raises ValueError for settings that transformers' class ignores.
    """
    check_supported(config, {"use_qk_norm": (True,), "use_cla": (False,)})
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if "dynamic" not in (rope.get("rope_type"), rope.get("type")) or not rope.get("alpha"):
        return config
    dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    return config | {key: {"rope_type": "default", "rope_theta": base * rope["alpha"] ** (dim / (dim - 2))}}


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + attention_biases(config) + ROTATED_QK_NORMS + mlp()


HUNYUAN_DEFAULTS = DEFAULTS | {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}

FAMILY = Family(
    name="hunyuan_v1_dense",
    architectures=("HunYuanDenseV1ForCausalLM",),
    models="Hunyuan 0.5B, 1.8B, 4B and 7B; Hunyuan-MT 7B",
    architecture=architecture,
    mappings=mappings,
    limits=("use_qk_norm false and use_cla true (transformers' class ignores them)",),
    defaults=HUNYUAN_DEFAULTS,
)
