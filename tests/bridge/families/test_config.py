"""What families make of a config.json: against transformers' config classes, and what they refuse."""

import copy
import importlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.safetensors_io import INDEX
from megaswift.bridge.families import FAMILIES, family_of
from megaswift.bridge.families.__main__ import PAGE, page
from megaswift.bridge.mapping.architecture import Rope
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import tiny
from tests.bridge.families.published import MODELS

# What a family asks for by name, where transformers' config has no default, or one that makes no model.
ASKED = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "lfm2": {"block_auto_adjust_ff_dim": False},  # else the width is not intermediate_size
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
}
# The config whose tie_word_embeddings counts, where it is not the text model's own.
OUTER = {
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "glm4v_text": "glm4v",
    "qwen3_asr": "qwen3_asr",
    "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
    "qwen2_5_omni_text": "qwen2_5_omni_thinker",
}
# The config of the text model, where the family has the name of the whole one.
TEXT = {"qwen3_asr": "qwen3", "llava_onevision": "qwen2", "ovis2": "qwen2"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_missing_keys_take_the_defaults_of_transformers(family):
    """A config.json of nothing but its architecture is transformers' default model."""
    asked = ASKED.get(family.name, {})
    about = family.describe({"architectures": list(family.architectures[:1]), **asked})
    config = CONFIG_MAPPING[TEXT.get(family.name, family.name)](**asked)
    config.allow_global_per_layer_attribute_access = True  # Gemma 4: heads differ between layers
    given = about.transformer
    assert given["num_layers"] == len(about.layers) == config.num_hidden_layers
    assert given["hidden_size"] == config.hidden_size
    heads = config.num_attention_heads
    assert given["num_attention_heads"] == heads
    names = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
    assert given["layernorm_epsilon"] == next(getattr(config, name) for name in names if hasattr(config, name))
    is_tied = (
        CONFIG_MAPPING[OUTER[family.name]]().tie_word_embeddings if family.name in OUTER else config.tie_word_embeddings
    )
    assert (about.vocab_size, about.tied) == (config.vocab_size, is_tied)
    assert about.max_positions == config.max_position_embeddings
    if given.get("multi_latent_attention"):
        assert given["qk_head_dim"] == config.qk_nope_head_dim
        assert (given["q_lora_rank"], given["kv_lora_rank"]) == (config.q_lora_rank, config.kv_lora_rank)
    else:
        assert given["num_query_groups"] == (config.num_key_value_heads or heads)  # Nemotron: None
        assert given["kv_channels"] == (getattr(config, "head_dim", None) or config.hidden_size // heads)
    wide = "intermediate_size_mlp" if family.name == "llama4_text" else "intermediate_size"
    if getattr(config, wide, None):
        assert given["ffn_hidden_size"] == getattr(config, wide)
    has_rope = getattr(config, "position_embedding_type", "rope") is not None  # Granite 4
    ropes = (getattr(config, "rope_parameters", None) or {}) if has_rope else {}
    named = [ropes[kind] for kind in ("full_attention", "sliding_attention") if kind in ropes] or [ropes] * bool(ropes)
    assert [rope.base for rope in about.ropes] == [rope["rope_theta"] for rope in named]
    if not given.get("multi_latent_attention"):
        turning = [given["kv_channels"] * rope.get("partial_rotary_factor", 1.0) for rope in named]
        if family.name.startswith("gemma4"):  # wide heads, whose planes are all there: some do not turn
            turning[0] = config.per_layer_config["full_attention"].head_dim
        assert [rope.dim for rope in about.ropes] == turning
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" in kinds:
        windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        assert [layer.window for layer in about.layers] == windows
    if "num_moe_experts" in given:
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        assert given["num_moe_experts"] == next(getattr(config, name) for name in names if hasattr(config, name))
        topk = getattr(config, "num_experts_per_tok", None) or config.moe_k
        assert given["moe_router_topk"] == topk
    if family.name == "qwen3_moe":
        assert given["moe_ffn_hidden_size"] == config.moe_intermediate_size
        assert given["moe_layer_freq"] == [1] * config.num_hidden_layers
        assert given["moe_router_pre_softmax"] is not config.norm_topk_prob


def test_both_spellings_of_rope():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    older = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    oldest = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    newer = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    for config in (older, oldest, newer):
        about = family_of({"model_type": "llama"}).describe({"max_position_embeddings": 512, **config})
        assert about.ropes == (Rope(5e5, 128, {"rope_type": "llama3", **scaling}),)
    plain = family_of({"model_type": "llama"}).describe({"rope_theta": 1e6, "rope_scaling": None})
    assert plain.ropes == (Rope(1e6, 128),)


def test_two_rules_of_rope():
    """transformers takes rope_scaling alone: with rope_parameters beside it, it must say the same."""
    qwen3 = family_of({"model_type": "qwen3"})
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    added = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": yarn}
    theirs = transformers.Qwen3Config(**copy.deepcopy(added)).rope_parameters
    assert (theirs["rope_type"], theirs["rope_theta"]) == ("yarn", 1e4)
    for config in (
        added,
        added | {"rope_theta": 1e6},
        {"rope_parameters": yarn, "rope_scaling": yarn | {"factor": 2.0}},
    ):
        with pytest.raises(ValueError, match="put what is meant into rope_parameters, with its rope_theta"):
            qwen3.describe(config)
    both = {"rope_parameters": yarn | {"rope_theta": 1e6}, "rope_scaling": yarn, "rope_theta": 1e6}
    [rope] = qwen3.describe(both).ropes
    assert rope == qwen3.describe({"rope_parameters": both["rope_parameters"]}).ropes[0]
    theirs = transformers.Qwen3Config(**copy.deepcopy(both)).rope_parameters
    assert (theirs["rope_type"], theirs["factor"], theirs["rope_theta"]) == ("yarn", 4.0, rope.base)

    named = {"full_attention": {"rope_type": "default", "rope_theta": 2e6}, "sliding_attention": {"rope_theta": 3e4}}
    merged = {"rope_parameters": named, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    theirs = transformers.Gemma3TextConfig(**copy.deepcopy(merged)).rope_parameters
    everywhere, nearby = family_of({"model_type": "gemma3_text"}).describe(merged).ropes
    assert everywhere == Rope(theirs["full_attention"]["rope_theta"], 256, {"rope_type": "linear", "factor": 8.0})
    assert theirs["full_attention"]["rope_type"] == "linear"
    assert nearby == Rope(theirs["sliding_attention"]["rope_theta"], 256)


@pytest.mark.parametrize(
    ("step", "dense"),
    [(1, []), (1, [0, 3]), (2, []), (2, [1]), (3, None)],
)
def test_which_layers_have_experts(step, dense):
    config = tiny.config("qwen3_moe", num_hidden_layers=7, decoder_sparse_step=step, mlp_only_layers=dense)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    theirs = [int(hasattr(layer.mlp, "experts")) for layer in model.model.layers]
    raw = config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    assert family_of(raw).describe(raw).transformer["moe_layer_freq"] == theirs


@pytest.mark.parametrize("name", ["deepseek_sparse_attention", "indexed_attention"])
def test_layers_with_an_indexer_have_two_names(name) -> None:
    """transformers 5.20 writes the second, and reads the first as the same."""
    config = importlib.import_module("tests.bridge.families.deepseek_v32").config().to_dict()
    layers = config["num_hidden_layers"]
    plain = family_of(config).describe({key: value for key, value in config.items() if key != "layer_types"})
    assert family_of(config).describe(config | {"layer_types": [name] * layers}) == plain


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        (
            "qwen2",
            {"layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
            "layer_types with sliding_attention, and no sliding_window",
        ),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "one for each of the 32 layers"),
        ("qwen3", {"layer_types": ["full_attention", "spiral_attention"] * 16}, "spiral_attention.*set one for"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 16}, "layer_types that differ"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling of type 'dynamic', whose freq"),
        ("llama", {"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope scaling of type 'spiral'; supported are"),
        ("llama", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "no short_factor with a number for"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters for each type of layer",
        ),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'; Phi-3"),
        ("phi3", {"attention_bias": True}, "attention_bias True; this family is supported with False only"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size null"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ("minimax", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ("minimax", {"head_dim": 128, "rotary_dim": 64}, "rotary_dim 64; this family is supported with 128 only"),
        ("minimax", {"layer_types": ["lightning"] * 32}, "'lightning'.*: set one for each of the 32 layers"),
        ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        (
            "minimax_m2",
            {"qk_norm_type": "per_head"},
            "qk_norm_type 'per_head'; this family is supported with 'per_layer'",
        ),
        ("minimax_m2", {"shared_intermediate_size": 512}, "shared_intermediate_size or sliding_window"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias true"),
        (
            "ernie4_5_moe",
            {"moe_gate_act": "sigmoid"},
            "moe_gate_act 'sigmoid'; this family is supported with 'softmax'",
        ),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list with layers of linear attention"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 48}, "chunked_attention or full_attention"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 36}, "sliding_attention, and use_sliding_window false"),
        ("olmo3", {"rope_theta": 1e6}, "rope_theta 1000000.0, which transformers' Olmo3 gives"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1e6}}, "one set of rope_parameters: set full_attention"),
        ("glm4_moe_lite", {"first_k_dense_replace": 3}, "first_k_dense_replace 3, which transformers' class ignores"),
        ("glm4_moe_lite", {"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"]}, "with dense layers first"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank null: the indexer's queries need the latent queries"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave True; .* with False only"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave False; .* with True only"),
        ("glm_moe_dsa", {"layer_types": ["full_attention"] * 78}, "one for each of the 78 layers, deepseek_sparse_at"),
        ("glm_moe_dsa", {"index_topk_pattern": "SF" * 39}, "set full or shared for each of the 78 layers, full first"),
        ("glm_moe_dsa", {"indexer_types": ["full", "half"]}, r"indexer_types \['full', 'half'\]: set full or shared"),
        ("mistral4", {"rope_parameters": {"rope_theta": 1e4}}, "without llama_4_scaling_beta or original_max_pos"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1; this family is supported with 2 only"),
        (
            "phimoe",
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.1, "long_mscale": 1.2}},
            "short_mscale 1.1 and long_mscale 1.2: supported are two equal numbers",
        ),
        ("phimoe", {"rope_scaling": {"type": "yarn"}}, "rope_scaling of type 'yarn'; Phi-MoE is supported with"),
        ("nemotron_h", {"residual_in_fp32": True}, "residual_in_fp32 True; this family is supported with False only"),
        ("nemotron_h", {"hybrid_override_pattern": "M-X"}, "layer_types .*'X'.*: set one for each of the 3 layers"),
        ("nemotron_h", {"n_groups": 5}, "mamba_num_heads 128 and n_groups 5: the second must divide"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope False; this family is supported with True only"),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "dense"]}, "with dense layers first"),
        ("lfm2", {"conv_bias": True}, "conv_bias True; this family is supported with False only"),
        ("lfm2_moe", {"layer_types": ["conv"]}, "'conv'.*: set one for each of the 32 layers"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias True; this family is supported with False only"),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_rms_norm and mamba_norm_before_gate, which trans"),
        ("granitemoehybrid", {"mamba_n_groups": 2}, "mamba_n_groups 2; this family is supported with 1 only"),
        ("granitemoehybrid", {"mamba_n_heads": 100}, "mamba_n_heads 100 of mamba_d_head 81 in mamba_n_groups 1: the"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "linear_attention.*: set one for each of the 32 layers"),
        ("ministral3", {"rope_theta": 1e4}, "rope_theta 10000.0 and no rope_parameters: transformers' class then"),
        ("ministral3", {"rope_parameters": {"rope_theta": 1e6}}, "without llama_4_scaling_beta or original_max_pos"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern 'LLLG' and no layer_types"),
        ("exaone4", {"sliding_window": None, "layer_types": ["sliding_attention"] * 32}, "and no sliding_window"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm True; this family is supported with False only"),
        ("cohere2", {"sliding_window": None, "layer_types": ["sliding_attention"] * 40}, "and no sliding_window"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True; this family is supp"),
        (
            "starcoder2",
            {"norm_type": "rms_norm"},
            "norm_type 'rms_norm'; this family is supported with 'layer_norm' on",
        ),
        ("apertus", {"hidden_act": "silu"}, "hidden_act 'silu'; this family is supported with 'xielu' only"),
        (
            "gemma4_text",
            {"vocab_size_per_layer_input": 9},
            "vocab_size_per_layer_input 9; this family is supported with",
        ),
        ("gemma4_text", {"num_kv_shared_layers": 27}, "no layer before the last 27 has the attention of layer 5"),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 0, "per_layer_config": {"3": {"head_dim": 16}}},
            "head_dim and num_key_value_heads, the same for each layer with full_attention",
        ),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 0, "enable_moe_block": True},
            "config.json has enable_moe_block, and no num_experts",
        ),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm False; this family is supported with True only"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla True; this family is supported with False only"),
        ("hunyuan_v1_moe", {"num_experts": [8, 16]}, r"num_experts that differs between layers: \[8, 16\]"),
        ("hunyuan_v1_moe", {"num_shared_expert": [2] * 32}, "num_shared_expert 2; transformers' class takes 1"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers .* one number for each of 36 layers"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(model_type, config, message):
    config["model_type"] = model_type
    with pytest.raises(ValueError, match=message):
        family_of(config).describe(config)


def test_sliding_windows_that_no_layer_uses():
    """Qwen2's own settings: sliding_window is there, and switched off or beyond the last layer."""
    for config in (
        {"use_sliding_window": False, "sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 32},
    ):
        about = family_of({"model_type": "qwen2"}).describe(config)
        assert {layer.window for layer in about.layers} == {None}


def test_older_names_of_gemmas_ropes():
    """config.json of the first Gemma 3 files: two bases by name, a pattern of layers, scaling of the global rope."""
    config = {
        "num_hidden_layers": 7,
        "head_dim": 16,
        "sliding_window": 512,
        "sliding_window_pattern": 3,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    about = family_of({"model_type": "gemma3_text"}).describe(config)
    assert about.ropes == (Rope(5e5, 16, {"rope_type": "linear", "factor": 8.0}), Rope(2e4, 16))
    assert [layer.window for layer in about.layers] == [512, 512, None] * 2 + [512]
    assert [layer.rope for layer in about.layers] == [1, 1, 0] * 2 + [1]


def test_unknown_architecture():
    known = "Qwen2ForCausalLM, InternVLForConditionalGeneration, InternVLChatModel, Qwen3ForCausalLM, "
    with pytest.raises(ValueError, match=rf"architecture BertForMaskedLM, which .* It supports: {known}"):
        family_of({"architectures": ["BertForMaskedLM"], "model_type": "bert"})
    with pytest.raises(ValueError, match=r"model_type None, which"):
        family_of({})


@pytest.mark.parametrize(
    ("name", "changes", "tower", "said"),
    [
        (
            "Mistral-Small-3.1-24B-Instruct-2503",
            {"vision_feature_layer": -2},
            {},
            "vision_feature_layer -2; .* -1 only",
        ),
        (
            "Mistral-Small-3.1-24B-Instruct-2503",
            {},
            {"patch_size": [14, 14]},
            r"patch_size \[14, 14\]: patches are squares",
        ),
        ("Ministral-3-3B-Base-2512", {}, {"attention_dropout": 0.1}, "attention_dropout 0.1; .* 0 only"),
        ("Ministral-3-3B-Base-2512", {}, {"model_type": "siglip"}, "model_type 'siglip'; .* 'pixtral' only"),
        ("InternVL3_5-8B-HF", {}, {"use_qk_norm": True}, "use_qk_norm True; .* False only"),
        ("InternVL3_5-8B-HF", {}, {"image_size": [448, 224]}, r"image_size \[448, 224\]: only squares"),
        ("Llama-4-Scout-17B-16E-Instruct", {}, {"vision_output_dim": 7680}, "vision_output_dim 7680; .* 4096 only"),
        ("Llama-4-Scout-17B-16E-Instruct", {}, {"pixel_shuffle_ratio": 0.25}, "pixel_shuffle_ratio 0.25; .* 0.5 only"),
        (
            "llava-onevision-qwen2-7b-ov-hf",
            {"vision_aspect_ratio": "pad"},
            {},
            "vision_aspect_ratio 'pad': only anyres",
        ),
        ("llava-onevision-qwen2-7b-ov-hf", {"vision_feature_layer": -2}, {}, "vision_feature_layer -2; .* -1 only"),
        ("Ovis2-1B-hf", {}, {"tokenize_function": "st_argmax"}, "tokenize_function 'st_argmax'; .* 'softmax' only"),
        ("Ovis2-1B-hf", {}, {"qkv_bias": True}, "mlp_bias False; .* True only"),
        ("Ovis2-1B-hf", {}, {"image_size": 462}, "hidden_stride 2: only squares of whole visual tokens"),
        ("Ovis2-1B-hf", {"vocab_size": 151643}, {}, "vocab_size 151643; .* 151936 only"),
        ("gemma-4-12B-it", {}, {"output_proj_dims": 1920}, "output_proj_dims 1920; .* 3840 only"),
        ("gemma-4-31B-it", {}, {"num_key_value_heads": 8}, "num_key_value_heads 8; .* 16 only"),
        ("gemma-4-31B-it", {}, {"head_dim": 64}, "head_dim 64 in vision_config: .* 4 with 16 heads in .* 1152"),
        ("gemma-4-31B-it", {}, {"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear'; .* 'default' only"),
        ("Kimi-K2.5", {}, {"merge_type": "sd2"}, "merge_type 'sd2'; .* 'sd2_tpool' only"),
        ("Kimi-K2.5", {}, {"mm_hidden_size": 1024}, "mm_hidden_size 1024; .* 1152 only"),
        ("Kimi-K2.5", {"projection_layer_norm_eps": 1e-6}, {}, "1e-06 as the epsilon of the projector's norm"),
        ("Kimi-VL-A3B-Instruct", {}, {"model_type": "siglip"}, "model_type 'siglip'"),
        ("InternVL3_5-8B-HF", {"downsample_ratio": 0.25}, {}, "downsample_ratio 0.25; .* 0.5 only"),
    ],
)
def test_towers_that_are_not_supported(name, changes, tower, said):
    """Refused by name, and by images alone: the language model trains."""
    config = MODELS[name].config | changes
    config |= {"vision_config": config["vision_config"] | tower}
    family_of(config).describe(config)
    with pytest.raises(ValueError, match=said):
        family_of(config).describe(config, vision=True)


def test_text_models_of_one_vision_language_architecture():
    """The text model's own type says which; without one it is Mistral, as in transformers."""
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    assert family_of(config | {"text_config": {}}).name == "mistral"
    for name in ("mistral", "ministral3", "mistral4"):
        assert family_of(config | {"text_config": {"model_type": name}}).name == name
    with pytest.raises(ValueError, match="Mistral3ForConditionalGeneration with the text model 'mistral5', which"):
        family_of(config | {"text_config": {"model_type": "mistral5"}})


def test_weights_of_another_model(tmp_path):
    """Names are compared before anything is read, in both directions."""
    folder = tiny.save(tmp_path / "model", "qwen3")
    config = json.loads((folder / "config.json").read_text()) | {"layer_types": None}
    with pytest.raises(ValueError, match=r"lacks 11 tensors \(model.layers.4.input_layernorm.weight, .*qwen3 model"):
        load_weights([], config | {"num_hidden_layers": 5}, folder)
    with pytest.raises(ValueError, match=r"has 11 tensors \(model.layers.3.input_layernorm.weight, .* no place for"):
        load_weights([], config | {"num_hidden_layers": 3}, folder)
    save_file({"lm_head.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks \d+ tensors"):
        load_weights([], config, folder)


def test_a_shard_that_the_index_lacks(tmp_path):
    folder = tmp_path / "model"
    tiny.model("qwen3").save_pretrained(folder, max_shard_size="200kB")
    index = json.loads((folder / INDEX).read_text())
    last = max(index["weight_map"].values())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != last}
    (folder / INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=rf"lacks \d+ tensors? .*index.json does not name {last}, which is there"):
        load_weights([], config, folder)


def test_the_page_of_models_is_up_to_date():
    assert PAGE.read_text() == page(), "run: python -m megaswift.bridge.families"


@pytest.mark.parametrize("path", ["bridge/families/seed_oss.py", "tests/bridge/families/seed_oss.py"])
def test_the_guide_shows_the_files_of_its_example(path):
    root = Path(__file__).parents[3]
    guide = (root / "docs" / "new-family.md").read_text()
    assert f"`{path}`:\n\n```python\n{(root / path).read_text()}```" in guide
