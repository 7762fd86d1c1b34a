"""StarCoder2: LayerNorms, biases on all matrices, MLPs of a GELU without a gate, and windows in every layer."""

from ..mapping.architecture import Architecture, HfConfig, Layer
from ..mapping.param_mapping import COLUMN, REPLICATED, ROW, Family, ParamMapping
from .decoder import (
    ATTENTION,
    DEFAULTS,
    ENDS,
    NORM_BIASES,
    OUTPUT_BIAS,
    QKV_BIAS,
    check_supported,
    describe_decoder,
    layer_mapping,
)

MLP = [
    layer_mapping("mlp.c_fc.weight", "mlp.linear_fc1.weight", COLUMN),
    layer_mapping("mlp.c_proj.weight", "mlp.linear_fc2.weight", ROW),
]
MLP_BIASES = [
    layer_mapping("mlp.c_fc.bias", "mlp.linear_fc1.bias", COLUMN),
    layer_mapping("mlp.c_proj.bias", "mlp.linear_fc2.bias", REPLICATED),
]


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, {"mlp_type": ("default",), "norm_type": ("layer_norm",)})
    bias = config["use_bias"]
    return describe_decoder(
        config | {"rms_norm_eps": config["norm_epsilon"]},
        {"normalization": "LayerNorm", "add_qkv_bias": bias, "gated_linear_unit": False},
        layers=(Layer(window=config.get("sliding_window")),) * config["num_hidden_layers"],
        output_bias=bias,
        mlp_bias=bias,
    )


def mappings(config: HfConfig) -> list[ParamMapping]:
    biases = QKV_BIAS + OUTPUT_BIAS + MLP_BIASES if config["use_bias"] else []
    return ENDS + ATTENTION + NORM_BIASES + MLP + biases


FAMILY = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    models="StarCoder2 3B, 7B and 15B",
    architecture=architecture,
    mappings=mappings,
    limits=("mlp_type other than default; norm_type other than layer_norm (transformers' class ignores both)",),
    defaults=DEFAULTS
    | {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
)
