"""Gemma 4 text, dense: heads of another size in layers with full attention, where values can be the keys.

Norms are as in Gemma 3, with weights around 1. Values are divided by their root mean square, a number of the checkpoint
scales each layer's output, and logits are capped. Checkpoints are Gemma4ForConditionalGeneration, with a tower for
images of any size (bridge/families/gemma4_vision.py).
"""

import math
from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Layer, Vision
from ..mapping.param_mapping import REPLICATED, Family, ParamMapping, qkv_of_groups
from .decoder import (
    DEFAULTS,
    ENDS,
    PROJECTIONS,
    QK_NORMS,
    check_supported,
    describe_decoder,
    layer_mapping,
    mlp,
    read_rope,
    sliding_layers,
)
from .gemma2 import FOUR_NORMS
from .gemma4_vision import tower_mappings, tower_settings
from .vlm_text import add_language_model_prefix, text_config

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
HEAD_KEYS = {"head_dim", "num_key_value_heads"}
# E2B and E4B have the first two, 26B-A4B has the third.
SUPPORTED = {
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
    "enable_moe_block": (False,),
    "attention_bias": (False,),
    "use_bidirectional_attention": ("vision",),
}


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, SUPPORTED)
    layers, ropes = list_layers(config), config.get("rope_parameters") or ROPES
    if ropes.keys() != ROPES.keys():
        raise ValueError("config.json has rope_parameters that are not those of full_attention and sliding_attention")
    full_dim = next((layer.head_dim for layer in layers if layer.head_dim), config["head_dim"])
    dims = {"full_attention": full_dim, "sliding_attention": config["head_dim"]}
    return describe_decoder(
        config | {"hidden_act": config["hidden_activation"]},
        {"qk_layernorm": True, "softmax_scale": 1.0},
        ropes=tuple(read_rope(config | {"rope_parameters": ropes[kind]}, dim) for kind, dim in dims.items()),
        layers=layers,
        embedding_scale=math.sqrt(config["hidden_size"]),
        logits_cap=config.get("final_logit_softcapping"),
        layer_scalar=True,
        value_norm=True,
        post_norms=True,
        blocks_in_windows=True,
        passthrough=r"(model\.)?(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio)\.",
    )


def list_layers(config: HfConfig) -> tuple[Layer, ...]:
    """Describe the layers: windows, or full attention with heads of another size and number.

    Raises ValueError if full layers differ from each other, or windows have heads of their own.
    """
    types = [
        "full_attention" if (number + 1) % 6 == 0 else "sliding_attention"
        for number in range(config["num_hidden_layers"])
    ]
    types = [*(config.get("layer_types") or types)[:-1], "full_attention"]  # transformers replaces the last too
    layers = sliding_layers(config | {"layer_types": types}, [])
    full = replace(layers[-1], **_full_heads(config, types), has_values=not config["attention_k_eq_v"])
    return tuple(replace(layer, rope=1) if layer.window else full for layer in layers)


def _full_heads(config: HfConfig, types: list[str]) -> dict[str, int | None]:
    """Return `head_dim` and `groups` of the layers with full attention."""
    groups = config["num_global_key_value_heads"] if config["attention_k_eq_v"] else None
    by_layer = config.get("per_layer_config")  # transformers writes it in place of keys for all such layers
    if by_layer is None:
        return {"head_dim": config["global_head_dim"], "groups": groups}
    full = {number for number, kind in enumerate(types) if kind == "full_attention"}
    first, *others = by_layer.values()
    if set(map(int, by_layer)) != full or any(heads != first for heads in others) or first.keys() - HEAD_KEYS:
        raise ValueError(
            f"config.json has per_layer_config {by_layer}: set {' and '.join(sorted(HEAD_KEYS))}, the same for each "
            "layer with full_attention"
        )
    return {"head_dim": first.get("head_dim"), "groups": first.get("num_key_value_heads")}


def vision(hf_config: HfConfig) -> Vision:
    text = FAMILY.defaults | hf_config["text_config"]
    check_bidirectional_images(text)
    return tower_settings(hf_config, text["hidden_size"])


def check_bidirectional_images(text: HfConfig) -> None:
    """Raise ValueError unless the visual tokens of an image attend to each other in both directions."""
    if text.get("use_bidirectional_attention") != "vision":
        raise ValueError(
            f"config.json has use_bidirectional_attention {text.get('use_bidirectional_attention')!r}: images are "
            "supported with 'vision' only"
        )


def mappings(config: HfConfig) -> list[ParamMapping]:
    layers = list_layers(config)
    windows = tuple(number for number, layer in enumerate(layers) if layer.window)
    full = tuple(number for number, layer in enumerate(layers) if not layer.window)
    qkv, output = PROJECTIONS
    kind = qkv_of_groups(layers[-1].groups or config["num_key_value_heads"], has_values=layers[-1].has_values)
    projections = [replace(qkv, layers=windows), replace(qkv, kind=kind, layers=full), output]
    scalar = layer_mapping("layer_scalar", "layer_scalar", REPLICATED)
    return [*ENDS, *FOUR_NORMS, *projections, *QK_NORMS, *mlp(), scalar]


FAMILY = Family(
    name="gemma4_text",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    models="Gemma 4 31B",
    architecture=architecture,
    mappings=mappings,
    text_config=text_config,
    vision=vision,
    vision_mappings=tower_mappings,
    vlm_names=(add_language_model_prefix,),
    limits=(
        "hidden_size_per_layer_input and num_kv_shared_layers (E2B, E4B)",
        "enable_moe_block (26B-A4B)",
        "attention_bias",
        "use_clipped_linears",
        "videos and audio: the audio tower passes through unchanged",
    ),
    defaults=DEFAULTS
    | {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
    },
)
