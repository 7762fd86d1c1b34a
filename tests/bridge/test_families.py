"""What families make of a config.json: against transformers' config classes, and what they refuse."""

import json

import pytest
import torch
import transformers
from megaswift.bridge.families import FAMILIES, family_of
from megaswift.bridge.families.__main__ import PAGE, page
from megaswift.bridge.load import load_weights
from megaswift.bridge.rows import Rope
from safetensors.torch import save_file

from tests import tiny

CONFIGS = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "llama": transformers.LlamaConfig,
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_missing_keys_take_the_defaults_of_transformers(family):
    """A config.json of nothing but its architecture is transformers' default model."""
    about = family.describe({"architectures": list(family.architectures)})
    config = CONFIGS[family.name]()
    given = about.transformer
    assert given["num_layers"] == config.num_hidden_layers
    assert given["hidden_size"] == config.hidden_size
    assert given["ffn_hidden_size"] == config.intermediate_size
    assert given["num_attention_heads"] == config.num_attention_heads
    assert given["num_query_groups"] == config.num_key_value_heads
    assert given["kv_channels"] == getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    assert given["layernorm_epsilon"] == config.rms_norm_eps
    assert (about.vocab_size, about.tied) == (config.vocab_size, config.tie_word_embeddings)
    assert about.max_positions == config.max_position_embeddings
    assert about.ropes == (Rope(config.rope_parameters["rope_theta"], about.transformer["kv_channels"]),)
    if family.name == "qwen3_moe":
        assert given["num_moe_experts"] == config.num_experts
        assert given["moe_router_topk"] == config.num_experts_per_tok
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


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "num_hidden_layers": 30},
            "use_sliding_window or layer_types with layers",
        ),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window or layer_types"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window or layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias true"),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "norm_topk_prob true"),
        ("llama", {"attention_bias": True}, "attention_bias True and mlp_bias False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling of type 'dynamic'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters for each type of layer",
        ),
        ("qwen2", {"quantization_config": {"bits": 4}}, "quantization_config"),
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
        family_of({"model_type": "qwen2"}).describe(config)


def test_unknown_architecture():
    known = "Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, LlamaForCausalLM"
    with pytest.raises(ValueError, match=rf"architecture BertForMaskedLM, which .* It knows: {known}"):
        family_of({"architectures": ["BertForMaskedLM"], "model_type": "bert"})
    with pytest.raises(ValueError, match=r"model_type None, which"):
        family_of({})


def test_weights_of_another_model(tmp_path):
    """Names are compared before anything is read, in both directions."""
    folder = tiny.save(tmp_path / "model", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"lacks 11 tensors \(model.layers.4.input_layernorm.weight, .*qwen3 model"):
        load_weights([], config | {"num_hidden_layers": 5}, folder)
    with pytest.raises(ValueError, match=r"has 11 tensors \(model.layers.3.input_layernorm.weight, .* no place for"):
        load_weights([], config | {"num_hidden_layers": 3}, folder)
    save_file({"lm_head.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks \d+ tensors"):
        load_weights([], config, folder)


def test_the_page_of_models_is_up_to_date():
    assert PAGE.read_text() == page(), "run: python -m megaswift.bridge.families"
