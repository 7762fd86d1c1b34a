"""SmolLM3: Llama's layers, of which every fourth has no position embedding."""

from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Layer
from ..mapping.param_mapping import Family
from .decoder import DEFAULTS, describe_decoder, sliding_layers
from .llama import mappings


def architecture(config: HfConfig) -> Architecture:
    bias = config["attention_bias"]
    return describe_decoder(
        config, {"add_qkv_bias": bias}, layers=_layers(config), output_bias=bias, mlp_bias=config["mlp_bias"]
    )


def _layers(config: HfConfig) -> tuple[Layer, ...]:
    num_layers, interval = config["num_hidden_layers"], config["no_rope_layer_interval"]
    has_rope = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(has_rope) < num_layers:
        raise ValueError(f"config.json has no_rope_layers {has_rope}: set one number for each of {num_layers} layers")
    if not config["use_sliding_window"] and "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("config.json has layer_types with sliding_attention, and use_sliding_window false")
    window = config.get("sliding_window") if config["use_sliding_window"] else None
    layers = sliding_layers(
        config | {"sliding_window": window},
        [window is not None and not has_rope[layer] for layer in range(num_layers)],
    )
    return tuple(replace(layer, rope=0 if rope else None) for layer, rope in zip(layers, has_rope, strict=False))


FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    models="SmolLM3 3B",
    architecture=architecture,
    mappings=mappings,
    defaults=DEFAULTS
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    },
)
