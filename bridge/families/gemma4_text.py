"""Gemma 4 text: heads of another size in layers with full attention, where values can be the keys.

Norms are as in Gemma 3, with weights around 1. Values are divided by their root mean square, a number of the checkpoint
scales each layer's output, and logits are capped. 26B-A4B adds the output of experts to that of each layer's dense MLP,
which is a shared expert here. In E4B and E2B each token gives each layer a vector, and the last layers attend to the
keys and values of earlier ones. Checkpoints are Gemma4ForConditionalGeneration, with a tower for images of any size
(bridge/families/gemma4_vision.py).
"""

import math
from dataclasses import replace

from ..mapping.architecture import Architecture, HfConfig, Layer, Routing, TransformerArgs, Vision
from ..mapping.param_mapping import COLUMN, FUSED_GATE_UP, REPLICATED, ROW, VOCAB, Family, ParamMapping, qkv_of_groups
from .decoder import (
    DEFAULTS,
    ENDS,
    POST_NORMS,
    PROJECTIONS,
    QK_NORMS,
    check_supported,
    describe_decoder,
    layer_mapping,
    mlp,
    read_rope,
    shared_experts,
    sliding_layers,
)
from .gemma2 import INPUT_NORM, PRE_MLP_NORM
from .gemma4_vision import tower_mappings, tower_settings
from .vlm_text import add_language_model_prefix, text_config

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
EXPERTS = [
    layer_mapping("pre_feedforward_layernorm.weight", "mlp.shared_input_norm.weight", REPLICATED),
    layer_mapping("post_feedforward_layernorm_1.weight", "mlp.shared_output_norm.weight", REPLICATED),
    layer_mapping("pre_feedforward_layernorm_2.weight", "mlp.input_norm.weight", REPLICATED),
    layer_mapping("post_feedforward_layernorm_2.weight", "mlp.output_norm.weight", REPLICATED),
    layer_mapping("router.proj.weight", "mlp.router.weight", REPLICATED),
    layer_mapping("router.scale", "mlp.router.norm.weight", REPLICATED),
    layer_mapping("router.per_expert_scale", "mlp.router.expert_factors", REPLICATED),
    layer_mapping("experts.gate_up_proj", "mlp.experts.linear_fc1.weight", FUSED_GATE_UP, stacked=True),
    layer_mapping("experts.down_proj", "mlp.experts.linear_fc2.weight", ROW, stacked=True),
    *shared_experts("mlp"),
]
LAYER_INPUTS = [
    ParamMapping("model.embed_tokens_per_layer.weight", "embedding.layer_inputs.word_embeddings.weight", VOCAB),
    ParamMapping(
        "model.per_layer_model_projection.weight", "embedding.layer_inputs.layer_projection.weight", REPLICATED
    ),
    ParamMapping("model.per_layer_projection_norm.weight", "embedding.layer_inputs.norm.weight", REPLICATED),
    layer_mapping("per_layer_input_gate.weight", "input_gate.weight", REPLICATED),
    layer_mapping("per_layer_projection.weight", "input_proj.weight", REPLICATED),
    layer_mapping("post_per_layer_input_norm.weight", "input_norm.weight", REPLICATED),
]
IMAGE_TOKEN = 258880  # without image_token_id in config.json
HEAD_KEYS = {"head_dim", "num_key_value_heads"}
SUPPORTED = {
    "attention_bias": (False,),
    "use_bidirectional_attention": ("vision",),
}


def architecture(config: HfConfig) -> Architecture:
    check_supported(config, SUPPORTED)
    size = config["hidden_size_per_layer_input"]
    if size:
        check_supported(config, {"vocab_size_per_layer_input": (config["vocab_size"],)})
    layers, ropes = list_layers(config), config.get("rope_parameters") or ROPES
    if ropes.keys() != ROPES.keys():
        raise ValueError("config.json has rope_parameters that are not those of full_attention and sliding_attention")
    full_dim = next((layer.head_dim for layer in layers if layer.head_dim), config["head_dim"])
    dims = {"full_attention": full_dim, "sliding_attention": config["head_dim"]}
    experts = _expert_settings(config) if config["enable_moe_block"] else {}
    return describe_decoder(
        config | {"hidden_act": config["hidden_activation"]},
        {"qk_layernorm": True, "softmax_scale": 1.0} | experts,
        ropes=tuple(read_rope(config | {"rope_parameters": ropes[kind]}, dim) for kind, dim in dims.items()),
        layers=layers,
        embedding_scale=math.sqrt(config["hidden_size"]),
        logits_cap=config.get("final_logit_softcapping"),
        layer_scalar=True,
        layer_input_size=size or None,
        value_norm=True,
        post_norms=True,
        blocks_in_windows=True,
        expert_norms=config["enable_moe_block"],
        routing=Routing(input_norm=True, expert_factors=True) if config["enable_moe_block"] else None,
        passthrough=_passthrough(layers),
    )


def _expert_settings(config: HfConfig) -> TransformerArgs:
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if config.get(key) is None:
            raise ValueError(f"config.json has enable_moe_block, and no {key}: set it")
    return {
        "num_moe_experts": config["num_experts"],
        "moe_router_topk": config["top_k_experts"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": config["intermediate_size"],
    }


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
    return _share_keys(config, [replace(layer, rope=1) if layer.window else full for layer in layers])


def _share_keys(config: HfConfig, layers: list[Layer]) -> tuple[Layer, ...]:
    """Let the last layers attend to the keys and values of the last layer of their kind before them.

    Raises ValueError if there is none.
    """
    shared = config["num_kv_shared_layers"]
    first, width = len(layers) - shared, config["intermediate_size"] * (2 if config["use_double_wide_mlp"] else 1)
    if shared and config["enable_moe_block"]:
        raise ValueError("config.json has num_kv_shared_layers with enable_moe_block: set one of them")
    for number in range(first, len(layers)):
        source = next((i for i in reversed(range(first)) if layers[i].window == layers[number].window), None)
        if source is None:
            raise ValueError(
                f"config.json has num_kv_shared_layers {shared}: no layer before the last {shared} has the attention "
                f"of layer {number}. Set fewer"
            )
        layers[source] = replace(layers[source], gives_keys=True)
        layers[number] = replace(layers[number], kv_source=source, ffn_hidden_size=width)
    return tuple(layers)


def _passthrough(layers: tuple[Layer, ...]) -> str:
    """Return the pattern of towers' tensors, and of keys and values that files have and no layer reads."""
    towers = r"vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio"
    unread = [str(number) for number, layer in enumerate(layers) if layer.kv_source is not None]
    keys = rf"|(language_model\.)?layers\.({'|'.join(unread)})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)"
    return rf"(model\.)?({towers}{keys if unread else ''})\."


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
    tower = tower_settings(hf_config, text["hidden_size"])
    if not text["hidden_size_per_layer_input"]:
        return tower
    tokens = hf_config.get("image_token_id", IMAGE_TOKEN), text.get("pad_token_id")
    return replace(tower, layer_input_tokens=(tokens[0], tokens[1] or 0))


def mappings(config: HfConfig) -> list[ParamMapping]:
    layers = list_layers(config)
    keyed = [(number, layer) for number, layer in enumerate(layers) if layer.kv_source is None]
    windows = tuple(number for number, layer in keyed if layer.window)
    full = tuple(number for number, layer in keyed if not layer.window)
    keyless = tuple(number for number, layer in enumerate(layers) if layer.kv_source is not None)
    (qkv, output), (q_norm, k_norm) = PROJECTIONS, QK_NORMS
    kind = qkv_of_groups(layers[-1].groups or config["num_key_value_heads"], has_values=layers[-1].has_values)
    attention = [replace(qkv, layers=windows), replace(qkv, kind=kind, layers=full), output]
    attention.append(layer_mapping("self_attn.q_proj.weight", "self_attention.linear_qkv.weight", COLUMN, keyless))
    attention += [q_norm, replace(k_norm, layers=tuple(number for number, _ in keyed))]
    feed_forward = EXPERTS if config["enable_moe_block"] else [PRE_MLP_NORM, *mlp()]
    scalar = layer_mapping("layer_scalar", "layer_scalar", REPLICATED)
    inputs = LAYER_INPUTS if config["hidden_size_per_layer_input"] else []
    return [*ENDS, INPUT_NORM, *POST_NORMS, *attention, *feed_forward, scalar, *inputs]


FAMILY = Family(
    name="gemma4_text",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    models="Gemma 4 31B, E4B, E2B; 26B-A4B with experts (EP, ETP)",
    architecture=architecture,
    mappings=mappings,
    text_config=text_config,
    vision=vision,
    vision_mappings=tower_mappings,
    vlm_names=(add_language_model_prefix,),
    limits=(
        "attention_bias",
        "pipeline parallelism with hidden_size_per_layer_input (E2B, E4B)",
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
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "sliding_window": 512,
    },
)
