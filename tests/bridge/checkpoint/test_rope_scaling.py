"""`--rope_scaling` and `--max_model_len` beside transformers' rotary embeddings of the same config."""

import json
from typing import Any

import pytest
import torch
from megaswift.bridge.checkpoint.rope_scaling import scale_rope, scaled_folder
from megaswift.bridge.families import family_of
from megaswift.bridge.layers.rope import make_rotary_rule
from megaswift.bridge.options import ModelOptions
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "rope_theta": 1000.0,
}
V5 = {key: value for key, value in PLAIN.items() if key != "rope_theta"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def scaled(config: dict[str, Any], scaling: dict[str, Any], length: int | None = None) -> dict[str, Any]:
    return scale_rope(config, ModelOptions(rope_scaling=scaling, max_model_len=length))


@pytest.mark.parametrize("config", [PLAIN, V5], ids=["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("scaling", "length", "by_hand", "positions"),
    [
        ({"rope_type": "yarn"}, 250, YARN, 250),
        ({"type": "yarn", "factor": 4}, None, YARN, 256),
        ({"rope_type": "linear"}, 100, {"rope_type": "linear", "factor": 2.0}, 100),
        (LLAMA3, None, LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 64}, 128),
    ],
)
def test_frequencies_are_transformers(config, scaling, length, by_hand, positions, tmp_path):
    found = scaled(config, scaling, length)
    assert found["max_position_embeddings"] == positions
    expected = PLAIN | {"max_position_embeddings": positions, "rope_scaling": by_hand}
    rules = []
    for number, each in enumerate((found, expected)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(each))
        rules.append(LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)))
    (rope,) = family_of(found).describe(found).ropes
    ours = make_rotary_rule(rope, torch.device("cpu"))
    assert not torch.equal(ours.frequencies, make_rotary_rule(_plain(config), torch.device("cpu")).frequencies)
    for rule in rules:  # what is saved, and what is meant
        torch.testing.assert_close(ours.frequencies, rule.inv_freq)
        assert ours.factor == pytest.approx(rule.attention_scaling)


def _plain(config: dict[str, Any]) -> Any:
    return family_of(config).describe(config).ropes[0]


def test_scaling_starts_from_the_original_positions():
    """Scaling replaces what config.json already has."""
    yarn = PLAIN | {"max_position_embeddings": 256, "rope_scaling": YARN}
    assert scaled(yarn, {"rope_type": "yarn"}, 128)["rope_scaling"] == YARN | {"factor": 2.0}
    linear = PLAIN | {"max_position_embeddings": 128, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert scaled(linear, {"rope_type": "linear"}, 256)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert scaled(PLAIN, {}, 99) == PLAIN | {"max_position_embeddings": 99}
    assert scaled({"text_config": PLAIN}, {}, 99) == {"text_config": PLAIN | {"max_position_embeddings": 99}}
    assert scaled(PLAIN, {}) is PLAIN


@pytest.mark.parametrize(
    ("config", "scaling", "message"),
    [
        (PLAIN, {"rope_type": "dynamic", "factor": 2}, "no support for type dynamic, whose frequencies change"),
        (PLAIN, {"factor": 2}, "no support for type None"),
        (PLAIN, {"rope_type": "yarn"}, "needs a factor. Set --max_model_len, or"),
        (PLAIN, {"rope_type": "yarn", "factor": 0.5}, "factor 0.5 is no number of at least 1"),
        (PLAIN, {"rope_type": "yarn", "factr": 2}, "factr is no key of rope scaling"),
        (PLAIN, {"rope_type": "llama3", "factor": 2}, "low_freq_factor is missing. Add it."),
        (PLAIN | {"rope_local_base_freq": 10.0}, {"rope_type": "linear", "factor": 2}, "layers have several ropes"),
        ({"model_type": "llama"}, {"rope_type": "yarn"}, "config.json has no max_position_embeddings"),
    ],
)
def test_unusable_scaling_is_refused_by_name(config, scaling, message):
    with pytest.raises(ValueError, match="--rope_scaling") as error:
        scaled(config, scaling)
    assert message in str(error.value)


def test_engines_read_a_folder_of_links(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert scaled_folder(tmp_path, ModelOptions()) == tmp_path
    options = ModelOptions(rope_scaling={"rope_type": "yarn"}, max_model_len=256)
    folder = scaled_folder(tmp_path, options)
    assert folder == scaled_folder(tmp_path, options) != tmp_path
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == YARN
    assert (folder / "tokenizer.json").resolve() == tmp_path / "tokenizer.json"
    assert json.loads((tmp_path / "config.json").read_text()) == PLAIN
