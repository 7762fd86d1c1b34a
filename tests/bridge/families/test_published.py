"""Models as they are published: their config.json is understood, and the table has their tensors, all of them."""

import importlib
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.checkpoint.conversion_report import unmapped_reasons
from megaswift.bridge.checkpoint.passthrough import passthrough_names
from megaswift.bridge.families import family_of
from megaswift.bridge.families.vlm_text import is_of_tower
from megaswift.bridge.layers.rope import make_rotary_rule
from megaswift.bridge.layers.tower_part import TowerPart
from megaswift.bridge.mapping.architecture import Architecture, Layer
from megaswift.bridge.mapping.param_mapping import TOWERS, MappingEntry, ParamKey, expand_mappings
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from tests.bridge.families.published import MODELS
from tests.kimi_vl import KimiVLConfig, KimiVLForConditionalGeneration
from tests.tiny_kimi_k25 import name_on_the_hub


def sizes(name: str, about: Architecture, layer: Layer) -> tuple[int, ...]:
    """The shape of megatron-core's whole tensor `name`, from the architecture alone."""
    of, (name, kind) = about.transformer, name.rsplit(".", 1)
    is_mamba = layer.mixer == "mamba" or ".mamba." in name
    last = name.rsplit(".", 1)[-1]
    hidden, heads, head = of["hidden_size"], of["num_attention_heads"], layer.head_dim or of["kv_channels"]
    groups = layer.groups or of["num_query_groups"]
    latent = of.get("multi_latent_attention", False)
    values, keys = of.get("linear_num_value_heads", 0), of.get("linear_num_key_heads", 0)
    mixed = 2 * keys * of.get("linear_key_head_dim", 0) + values * of.get("linear_value_head_dim", 0)
    attended = heads * (of["v_head_dim"] if latent else head)
    turning, plain = of.get("qk_pos_emb_head_dim", 0), of.get("qk_head_dim", 0)
    inner, outer = of["ffn_hidden_size"], hidden
    if ".experts." in name:
        inner, outer = of["moe_ffn_hidden_size"], about.expert_latent or hidden
    elif ".shared_experts" in name:
        inner = of["moe_shared_expert_intermediate_size"]
    elif layer.ffn_hidden_size:
        inner = layer.ffn_hidden_size
    vectors = about.layer_input_size or 0
    projections = 0 if layer.kv_source is not None else 2 if layer.has_values else 1
    normed = {
        "q_layernorm": of.get("q_lora_rank") if latent else head * (heads if about.qk_norm == "all" else 1),
        "k_layernorm": head * (groups if about.qk_norm == "all" else 1),
        "kv_layernorm": of.get("kv_lora_rank"),
    }
    queries = 2 * heads if of.get("attention_output_gate") else heads
    shape = {
        "word_embeddings": (about.vocab_size, of["num_layers"] * vectors if ".layer_inputs." in name else hidden),
        "output_layer": (about.vocab_size, hidden),
        "linear_qkv": ((queries + projections * groups) * head, hidden),
        "layer_projection": (of["num_layers"] * vectors, hidden),
        "input_gate": (vectors, hidden),
        "input_proj": (hidden, vectors),
        "linear_proj": (hidden, attended),
        "linear_q_proj": (heads * (plain + turning), hidden),
        "linear_q_down_proj": (of.get("q_lora_rank"), hidden),
        "linear_q_up_proj": (heads * (plain + turning), of.get("q_lora_rank")),
        "linear_kv_down_proj": (of.get("kv_lora_rank", 0) + turning, hidden),
        "linear_kv_up_proj": (heads * (plain + of.get("v_head_dim", 0)), of.get("kv_lora_rank")),
        "in_proj": (mixed + values * (of.get("linear_value_head_dim", 0) + 2), hidden),
        "conv1d": (mixed, 1, of.get("linear_conv_kernel_dim")),
        "out_proj": (hidden, values * of.get("linear_value_head_dim", 0)),
        "linear_fc1": ((2 if of["gated_linear_unit"] else 1) * inner, outer),
        "linear_fc2": (outer, inner),
        "fc1_latent_proj": (about.expert_latent, hidden),
        "fc2_latent_proj": (hidden, about.expert_latent),
        "router": (of.get("num_moe_experts"), hidden),
        "eh_proj": (hidden, 2 * hidden),
        "conv": (hidden, 1, about.short_conv.kernel if about.short_conv else 0),
        **indexer_sizes(about),
        **(mamba_sizes(about) if is_mamba else {}),
        **(kimi_sizes(about) if layer.mixer == "kimi_delta" else {}),
        **({"in_proj": (3 * hidden, hidden), "out_proj": (hidden, hidden)} if layer.mixer == "short_conv" else {}),
        **(lightning_sizes(heads * head, hidden) if layer.mixer == "lightning_attention" else {}),
    }.get(last)
    if kind == "expert_bias" and about.routing and about.routing.choice_bias:
        return (1, of["num_moe_experts"])
    if about.kimi_delta and kind in ("A_log", "dt_bias"):
        heads, dim, _ = about.kimi_delta
        return (1, 1, heads, 1) if kind == "A_log" else (heads * dim,)
    if about.mamba and kind in ("A_log", "dt_bias", "D"):
        return (about.mamba.heads,)
    if kind in ("softmax_offset", "A_log", "dt_bias", "gate_weight"):
        return {"softmax_offset": (heads,), "gate_weight": (1, hidden)}.get(kind, (values,))
    if last == "activation_func" or kind == "layer_scalar":
        return (1,)
    if name.endswith("self_attention.norm") and layer.mixer == "gated_delta_net":
        return (of["linear_value_head_dim"],)
    if name.endswith("layer_inputs.norm"):
        return (vectors,)
    if shape is None:
        return (normed.get(last, hidden),)
    return shape if kind == "weight" else shape[:1]


def indexer_sizes(about: Architecture) -> dict[str, tuple[int, ...]]:
    """Of a lightning indexer: the shape of a matrix, or of a norm's two tensors."""
    if about.sparse is None:
        return {}
    hidden, heads, dim = about.transformer["hidden_size"], about.sparse.heads, about.sparse.head_dim
    matrices = {"wq_b": (heads * dim, about.transformer["q_lora_rank"]), "wk": (dim, hidden)}
    return matrices | {"weights_proj": (heads, hidden), "k_norm": (dim,)}


def mamba_sizes(about: Architecture) -> dict[str, tuple[int, ...]]:
    if about.mamba is None:
        return {}
    mamba, hidden = about.mamba, about.transformer["hidden_size"]
    values, keys = mamba.heads * mamba.head_dim, mamba.groups * mamba.state_dim
    return {
        "in_proj": (2 * values + 2 * keys + mamba.heads, hidden),
        "conv1d": (values + 2 * keys, 1, mamba.kernel),
        "out_proj": (hidden, values),
        "norm": (values,),
    }


def kimi_sizes(about: Architecture) -> dict[str, tuple[int, ...]]:
    assert about.kimi_delta is not None
    (heads, dim, kernel), hidden = about.kimi_delta, about.transformer["hidden_size"]
    latent = {f"{name}_down": (dim, hidden) for name in ("decay", "gate")}
    latent |= {f"{name}_up": (heads * dim, dim) for name in ("decay", "gate")}
    matrices = {"in_proj": (3 * heads * dim + heads, hidden), "out_proj": (hidden, heads * dim)}
    return latent | matrices | {"conv1d": (3 * heads * dim, 1, kernel), "norm": (dim,)}


def lightning_sizes(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {"in_proj": (4 * width, hidden), "out_proj": (hidden, width), "norm": (width,)}


def tensors(entries: dict[ParamKey, MappingEntry], about: Architecture) -> dict[str, tuple[int, ...]]:
    """The shapes of all Hugging Face tensors of the table, by name."""
    found, shapes = {}, {}
    for key, entry in entries.items():
        is_decoder = key.name.startswith("decoder.") and key.layer is not None
        layer = about.layers[key.layer] if is_decoder else Layer()
        alike = key.name, layer
        if alike not in shapes:
            whole = sizes(key.name, about, layer)
            shapes[alike] = list(entry.hf_shapes(whole, entry.spans(whole, 1, about)).values())
        found |= {name: entry.stored_shape(shape) for name, shape in zip(entry.hf, shapes[alike], strict=True)}
    return found


@cache
def text_model(name: str, mtp_depths: int = 0) -> tuple[Architecture, dict[str, tuple[int, ...]]]:
    """With so many layers of multi-token prediction, and the shapes of all its tensors."""
    config = MODELS[name].config
    family = family_of(config)
    about = replace(family.describe(config), mtp_depths=mtp_depths)
    return about, tensors(expand_mappings(family, config, about), about)


def count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_the_table(name):
    model = MODELS[name]
    about, found = text_model(name)
    assert family_of(model.config).name == model.family
    total, digits = count(found.values()), len(model.size.partition(".")[2])
    assert model.size in (str(total), f"{total / 1e9:.{digits}f}")
    assert unmapped_reasons(model.extra, about).keys() | passthrough_names(model.extra, about) == set(model.extra)
    assert not set(model.extra) & set(found)


@pytest.mark.parametrize(
    ("name", "tables", "published"),
    [("GLM-4.5", 2, 358337791296), ("GLM-4.5-Air", 2, 110468824832), ("GLM-4.6", 0, 356785898816)],
)
def test_layers_that_predict_further_tokens(name, tables, published):
    """What the hub counts in the files; some have copies of the embedding and of the output matrix there."""
    about, found = text_model(name, mtp_depths=1)
    copies = tables * about.vocab_size * about.transformer["hidden_size"]
    assert count(found.values()) + copies == published


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if "mtp.fc.weight" in model.extra])
def test_the_layer_beside_qwens_models_is_in_the_table(name):
    """Files have its experts one by one or stacked, and dense models none."""
    about, found = text_model(name, mtp_depths=1)
    layer = {each for each in MODELS[name].extra if each.startswith("mtp.")}
    experts = {each for each in layer if ".experts." in each}
    assert layer - experts <= found.keys()
    assert bool(experts & found.keys()) == ("num_moe_experts" in about.transformer)


def test_scales_of_quantised_matrices():
    """DeepSeek-V3's 684.5 billion on the hub are its tensors, two more tables, and a scale for each block."""
    about, found = text_model("DeepSeek-V3", mtp_depths=1)
    blocks = count((-(-shape[0] // 128), -(-shape[1] // 128)) for shape in _quantised(found).values())
    assert count(found.values()) + 2 * about.vocab_size * about.transformer["hidden_size"] + blocks == 684531386000
    # Kimi-K2's 139,644 tensors: with a buffer of rotary embeddings in each of 61 layers.
    _, found = text_model("Kimi-K2-Instruct")
    assert len(found) + len(_quantised(found)) + 61 == 139644


def _quantised(found: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {
        name: shape
        for name, shape in found.items()
        if re.search(r"(_proj|_with_mqa|kv_b_proj)\.weight", name) and "eh_proj" not in name
    }


@pytest.mark.parametrize(
    ("name", "prefix", "head"),
    [
        ("gemma-3-4b-it", "language_model.model.", None),
        ("Llama-4-Scout-17B-16E", "language_model.model.", "language_model.lm_head.weight"),
        ("Qwen3.5-0.8B", "model.language_model.", None),
        ("Qwen3.5-35B-A3B", "model.language_model.", "lm_head.weight"),
    ],
)
def test_text_models_within_models_that_see(name, prefix, head):
    _, found = text_model(name)
    assert {other for other in found if not other.startswith(prefix)} == ({head} if head else set())
    assert {prefix + "embed_tokens.weight", prefix + "layers.0.input_layernorm.weight"} < set(found)


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with eight layers and a few experts; all its widths stay."""
    text = dict(config.get("text_config", config), num_hidden_layers=8)
    for key in ("layer_types", "no_rope_layers", "attn_type_list", "hybrid_override_pattern"):
        if key in text:
            text[key] = text[key][:8]
    if delta := text.get("linear_attn_config"):
        kept = {key: [layer for layer in delta[key] if layer <= 8] for key in ("full_attn_layers", "kda_layers")}
        text["linear_attn_config"] = delta | kept
    if text.get("num_kv_shared_layers"):
        text["num_kv_shared_layers"] = 2
    if "moe_layers" in text:
        text["moe_layers"] = [layer for layer in text["moe_layers"] if layer < 8]
    if "moe_layer_end_index" in text:
        text["moe_layer_end_index"] = 7
    experts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    text |= {key: 16 for key in experts if key in text}
    text.pop("quantization_config", None)
    return config | {"text_config": text} if "text_config" in config else text


WITH_TOWER = [
    name
    for name, model in MODELS.items()
    if family_of(model.config).vision and family_of(model.config).has_tower(model.config)
]
# Whose text models transformers makes within a vision-language model only.
VISION_LANGUAGE = [name for name, model in MODELS.items() if re.search("_vl_|glm4v", model.family)]

TEXT = {"llava_onevision": "qwen2", "ovis2": "qwen2"}  # text models of families with the name of the whole one


def text_class(config: Any) -> Any:
    """transformers' class: Mistral 4's is in no list of language models."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    code = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    return getattr(code, type(config).__name__.replace("Config", "ForCausalLM"))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in VISION_LANGUAGE])
def test_names_and_shapes_and_ropes_are_those_of_transformers(name):
    """Of the text model alone: transformers' own, made of the published config.json and saved."""
    config = cut(MODELS[name].config)
    family = family_of(config)
    about = family.describe(config)
    name = TEXT.get(family.name, family.name)
    text = config.get("text_config", config) | {"model_type": name}
    if family.name == "llama4_text":
        text["attn_temperature_tuning"] = bool(text["attn_temperature_tuning"])  # transformers 5 asks for a bool
    if "rotary_dim" in text:
        text["partial_rotary_factor"] = text["rotary_dim"] / text["head_dim"]  # transformers does not know the first
    text.pop("auto_map", None)
    theirs = CONFIG_MAPPING[name].from_dict(text)
    with torch.device("meta"):
        model: Any = text_class(theirs)(theirs)
    state = model.state_dict()
    if about.tied:
        del state["lm_head.weight"]
    saved = {key: tuple(tensor.shape) for key, tensor in revert_weight_conversion(model, state).items()}
    found = tensors(expand_mappings(family, config, about, saved), about)
    alone = {re.sub(r"^(model\.)?language_model\.", r"\1", key): tuple(shape) for key, shape in found.items()}
    unread = passthrough_names(saved.keys() - alone.keys(), about)
    assert alone == {key: shape for key, shape in saved.items() if key not in unread}
    if about.ropes:
        check_ropes(about, getattr(model.model, "rotary_emb", None) or model.model.pos_emb, theirs)


@pytest.mark.parametrize("name", VISION_LANGUAGE)
def test_vision_language_models_are_those_of_transformers(name):
    """Of the whole model, whose text model cannot be made alone: the tower's tensors are all passed through."""
    config = cut(MODELS[name].config)
    family = family_of(config)
    about = family.describe(config)
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    with torch.device("meta"):
        model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(theirs)](theirs)
    saved = {key: tuple(tensor.shape) for key, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    for key in saved:
        if (
            ".mlp.experts." in key and len(saved[key]) == 3
        ):  # transformers transposes only what it has loaded transposed
            saved[key] = (saved[key][0], saved[key][2], saved[key][1])
    found = tensors(expand_mappings(family, config, about, saved), about)
    tower = passthrough_names(saved.keys() - found.keys(), about)
    assert {key: tuple(shape) for key, shape in found.items()} == {k: s for k, s in saved.items() if k not in tower}
    assert all("visual." in key for key in tower)
    check_ropes(about, model.model.language_model.rotary_emb, theirs.text_config)


# The tower's last layer and the norm behind it, or that norm.
UNUSED = {"llava": r"encoder\.layers\.23\.|post_layernorm", "llava_onevision": "post_layernorm"}


def vision_language_model(config: dict[str, Any]) -> Any:
    if config["model_type"] == "kimi_vl":
        names = "text_config", "vision_config", "media_placeholder_token_id"
        return KimiVLForConditionalGeneration(KimiVLConfig(*(config[name] for name in names)))
    if config["model_type"] == "llama4":
        tuning = bool(config["text_config"]["attn_temperature_tuning"])  # transformers 5 asks for a bool
        config = config | {"text_config": config["text_config"] | {"attn_temperature_tuning": tuning}}
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(theirs)](theirs)


@pytest.mark.parametrize("name", WITH_TOWER)
def test_towers_are_those_of_transformers(name):
    """Of the tower: the shapes of our modules, by the names of the table."""
    config = cut(MODELS[name].config)
    family = family_of(config)
    about = family.describe(config, vision=True)
    assert about.vision is not None
    with torch.device("meta"):
        model = vision_language_model(config)
    unused = UNUSED.get(config["model_type"], "$^")
    state = model.state_dict()
    if config["model_type"] == "kimi_k25":  # by the names of the files
        state = {name_on_the_hub(key): t for key, t in revert_weight_conversion(model, state).items()}
    if config["model_type"] == "gemma4_unified":
        state = revert_weight_conversion(model, state)
    state = {key: tensor for key, tensor in state.items() if is_of_tower(key)}
    tower = {key: tuple(tensor.shape) for key, tensor in state.items() if not re.search(unused, key)}
    settings: Any = SimpleNamespace(params_dtype=torch.bfloat16, attention_kernel="torch")
    shapes = {
        key: tuple(tensor.shape)
        for key, tensor in TowerPart(about.vision, None, settings, torch.device("meta")).state_dict().items()
    }
    found = {}
    for key, entry in expand_mappings(family, config, about, tower).items():
        if key.name.startswith(TOWERS):
            shape = shapes.pop(key.name.format(layer=key.layer))
            found |= entry.hf_shapes(shape, entry.spans(shape, 1, about))
    assert not shapes
    assert found == tower


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Mistral-Small-3.1-24B-Instruct-2503", 24011361280),
        ("Ministral-3-3B-Base-2512", 3849090048),
        ("InternVL3_5-8B-HF", 8528318464),
        ("Kimi-VL-A3B-Instruct", 16407656048),
        ("llava-1.5-7b-hf", 7063427072 - 12598272),  # but for the last layer and norm of its tower, which are not used
        ("llava-onevision-qwen2-7b-ov-hf", 8030348832 - 2304),  # but for the norm behind its tower, which is not used
        ("Ovis2-1B-hf", 1131283318),
        ("gemma-3-4b-it", 4300079472),
        ("gemma-3-27b-it", 27432406640),
        ("Llama-4-Scout-17B-16E-Instruct", 108641793536),
    ],
)
def test_parameters_of_whole_models(name, published):
    """The hub's counts of the files' parameters, towers included; Kimi-VL's are Moonlight's and those of its tower.

    Ovis2's is of transformers' class.
    """
    about, found = text_model(name)
    vision = family_of(MODELS[name].config).describe(MODELS[name].config, vision=True).vision
    assert vision is not None
    settings: Any = SimpleNamespace(params_dtype=torch.bfloat16, attention_kernel="torch")
    tower = TowerPart(vision, None, settings, torch.device("meta"))
    assert count(found.values()) + sum(p.numel() for p in tower.parameters()) == published
    assert about.tied == name.startswith(("Ministral", "gemma", "Ovis2"))


def check_ropes(about: Architecture, rotary: Any, config: Any) -> None:
    """Compare frequencies and factors with transformers' module, made anew outside the meta device."""
    turning = type(rotary)(config)
    ropes = [turning] if len(about.ropes) == 1 else [turning, turning]
    prefixes = ["", ""] if len(about.ropes) == 1 else ["full_attention_", "sliding_attention_"]
    for rope, module, prefix in zip(about.ropes, ropes, prefixes, strict=False):
        ours = make_rotary_rule(rope, torch.device("cpu"))
        torch.testing.assert_close(ours.frequencies, getattr(module, prefix + "inv_freq"), rtol=1e-6, atol=0)
        factor = getattr(module, prefix + "attention_scaling")
        if config.model_type == "phimoe":  # its forward pass has this factor instead
            factor = config.rope_parameters["short_mscale"]
        assert ours.factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("Qwen2.5-7B-Instruct", [None] * 28),
        ("Qwen1.5-MoE-A2.7B", [None] * 24),
        ("Mistral-7B-v0.1", [4096] * 32),
        ("Mistral-7B-v0.3", [None] * 32),
        ("Phi-3-mini-4k-instruct", [2047] * 32),
        ("phi-4", [None] * 40),
        ("gpt-oss-20b", [128, None] * 12),
        ("gemma-3-270m", ([512] * 5 + [None]) * 3),
        ("gemma-3-1b-it", ([512] * 5 + [None]) * 4 + [512] * 2),
        ("gemma-3-27b-it", ([1024] * 5 + [None]) * 10 + [1024] * 2),
        ("dots.llm1.inst", [None] * 62),
    ],
)
def test_windows(name, windows):
    about, _ = text_model(name)
    assert [layer.window for layer in about.layers] == windows


@pytest.mark.parametrize(
    ("name", "places", "experts", "chosen"),
    [
        ("Qwen3-30B-A3B-Instruct-2507", [1] * 48, 128, 8),
        ("Qwen3.5-35B-A3B", [1] * 40, 256, 8),
        ("DeepSeek-V2", [0] + [1] * 59, 160, 6),
        ("DeepSeek-V3", [0] * 3 + [1] * 58, 256, 8),
        ("Kimi-K2-Instruct", [0] + [1] * 60, 384, 8),
        ("GLM-4.5", [0] * 3 + [1] * 89, 160, 8),
        ("GLM-4.5-Air", [0] + [1] * 45, 128, 8),
        ("dots.llm1.inst", [0] + [1] * 61, 128, 6),
        ("ERNIE-4.5-21B-A3B-PT", [0] + [1] * 27, 64, 6),
        ("ERNIE-4.5-300B-A47B-PT", [0] * 3 + [1] * 51, 64, 8),
        ("Llama-4-Scout-17B-16E", [1] * 48, 16, 1),
        ("Llama-4-Maverick-17B-128E", [0, 1] * 24, 128, 1),
    ],
)
def test_experts(name, places, experts, chosen):
    of = text_model(name)[0].transformer
    assert (of["moe_layer_freq"], of["num_moe_experts"], of["moe_router_topk"]) == (places, experts, chosen)


def test_what_only_published_configs_say():
    def of(name: str) -> Architecture:
        return text_model(name)[0]

    # 192 dimensions, times the square of YaRN's 0.1 * log(40) + 1.
    assert of("DeepSeek-V3").transformer["softmax_scale"] == pytest.approx(0.1352337788608801)
    assert of("Moonlight-16B-A3B").transformer["softmax_scale"] == 192**-0.5
    assert of("DeepSeek-V3").transformer["moe_router_num_groups"] == 8
    assert "moe_router_num_groups" not in of("Kimi-K2-Instruct").transformer
    assert of("MiniMax-M2").ropes[0].dim == of("GLM-4.5").ropes[0].dim == of("Qwen3-Next-80B-A3B-Instruct").ropes[0].dim
    assert of("Llama-4-Maverick-17B-128E").qk_norm == "head"  # and none: transformer's qk_layernorm is off
    for name in ("Llama-4-Scout-17B-16E", "Llama-4-Scout-17B-16E-Instruct"):
        assert (of(name).qk_norm, of(name).query_growth) == ("l2", (0.1, 8192, 1, False))
        assert [layer.rope for layer in of(name).layers] == [0, 0, 0, None] * 12
        assert [layer.chunk for layer in of(name).layers] == [8192, 8192, 8192, None] * 12
    assert [layer.mixer for layer in of("Qwen3.5-27B").layers].count("gated_delta_net") == 48
    assert of("gemma-3-27b-it").transformer["softmax_scale"] == 168**-0.5
    assert of("Phi-4-mini-instruct").ropes[0].dim == 96
