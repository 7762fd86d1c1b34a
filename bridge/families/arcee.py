"""Arcee AFM: Llama's attention, and MLPs without a gate, of a squared ReLU."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import COLUMN, REPLICATED, ROW, Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, attention_biases, describe_decoder, layer_mapping

PLAIN_MLP = [
    layer_mapping("mlp.up_proj.weight", "mlp.linear_fc1.weight", COLUMN),
    layer_mapping("mlp.down_proj.weight", "mlp.linear_fc2.weight", ROW),
]
PLAIN_MLP_BIASES = [
    layer_mapping("mlp.up_proj.bias", "mlp.linear_fc1.bias", COLUMN),
    layer_mapping("mlp.down_proj.bias", "mlp.linear_fc2.bias", REPLICATED),
]


def architecture(config: HfConfig) -> Architecture:
    bias = config["attention_bias"]
    transformer = {"add_qkv_bias": bias, "gated_linear_unit": False}
    return describe_decoder(config, transformer, output_bias=bias, mlp_bias=config["mlp_bias"])


def mappings(config: HfConfig) -> list[ParamMapping]:
    biases = PLAIN_MLP_BIASES if config["mlp_bias"] else []
    return ENDS + ATTENTION + attention_biases(config) + PLAIN_MLP + biases


FAMILY = Family(
    name="arcee",
    architectures=("ArceeForCausalLM",),
    models="Arcee AFM-4.5B",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 32000,
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
)
