"""dots.llm1: Qwen3's attention and DeepSeek-V3's experts."""

from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import Family, ParamMapping
from .decoder import ATTENTION, DEFAULTS, ENDS, QK_NORMS, attention_biases, describe_decoder, sliding_layers
from .deepseek_moe import LIMITS, feed_forward, sigmoid_routing


def architecture(config: HfConfig) -> Architecture:
    bias = config["attention_bias"]
    for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        if config[key] is None:
            raise ValueError(f"config.json has no {key}, which dots.llm1 has no default for")
    routing, rule = sigmoid_routing(config)
    has_windows, first = config.get("sliding_window", 4096) is not None, config["max_window_layers"]
    layers = sliding_layers(config, [has_windows and i >= first for i in range(config["num_hidden_layers"])])
    transformer = {"qk_layernorm": True, "add_qkv_bias": bias} | routing
    return describe_decoder(config, transformer, routing=rule, output_bias=bias, layers=layers)


def mappings(config: HfConfig) -> list[ParamMapping]:
    return ENDS + ATTENTION + attention_biases(config) + QK_NORMS + feed_forward(config, bias=True)


FAMILY = Family(
    name="dots1",
    architectures=("Dots1ForCausalLM",),
    models="dots.llm1",
    architecture=architecture,
    mappings=mappings,
    limits=LIMITS,
    defaults=DEFAULTS
    | {
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "max_window_layers": 62,
    },
)
