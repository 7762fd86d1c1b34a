"""Published Omni models: the table has all tensors of the thinker that transformers makes of their config.json."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.families.thinker import lift_thinker, lower_thinker
from megaswift.bridge.layers.tower_part import TowerPart
from megaswift.bridge.mapping.architecture import HfConfig
from megaswift.bridge.mapping.param_mapping import TOWERS, expand_mappings
from megaswift.bridge.model.score_head import add_score_head, count_labels
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForMultimodalLM

from tests.bridge.families.test_published import check_ropes, count, sizes
from tests.bridge.omni.published import QWEN2_5_OMNI_7B, QWEN3_OMNI_30B_A3B

MODELS = {"Qwen3-Omni-30B-A3B": QWEN3_OMNI_30B_A3B, "Qwen2.5-Omni-7B": QWEN2_5_OMNI_7B}
UNUSED = "thinker.audio_tower.audio_bos_eos_token.weight"  # of Qwen2.5-Omni, in no computation


def cut(config: HfConfig) -> HfConfig:
    """The same model with four layers and a few experts; all its widths stay."""
    thinker = config["thinker_config"]
    text = thinker["text_config"] | {"num_hidden_layers": 4}
    text |= {"num_experts": 8} if "num_experts" in text else {}
    return config | {"thinker_config": thinker | {"text_config": text}}


def shapes(config: HfConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of the tensors in files, by the part of the model and by name."""
    config = lift_thinker(config)
    family = family_of(config)
    about = family.describe(config, vision=True)
    settings: Any = SimpleNamespace(params_dtype=torch.bfloat16, attention_kernel="torch")
    part = TowerPart(about.vision, about.audio, settings, torch.device("meta"))
    ours = {name: tuple(parameter.shape) for name, parameter in part.named_parameters()}
    found: dict[str, dict[str, tuple[int, ...]]] = {"vision": {}, "audio": {}, "text": {}}
    for key, entry in expand_mappings(family, config, about).items():
        is_of_tower = key.name.startswith(TOWERS)
        shape = ours.pop(key.name.format(layer=key.layer)) if is_of_tower else sizes(key.name, about, about.layers[0])
        kind = key.name.partition(".")[0] if is_of_tower else "text"
        found[kind] |= entry.hf_shapes(shape, entry.spans(shape, 1, about))
    assert not ours
    return found


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_and_ropes_are_those_of_transformers(name):
    config = cut(MODELS[name])
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(config).thinker_config
    with torch.device("meta"):
        model: Any = AutoModelForMultimodalLM.from_config(theirs)
    saved = revert_weight_conversion(model, model.state_dict())
    expected = {"thinker." + key: tuple(tensor.shape) for key, tensor in saved.items()}
    found = shapes(config)
    expected.pop(UNUSED, None)
    assert found["text"] | found["vision"] | found["audio"] == expected
    lifted = lift_thinker(config)
    check_ropes(family_of(lifted).describe(lifted), model.model.rotary_emb, theirs.text_config)


@pytest.mark.parametrize(
    ("name", "text", "vision", "audio"),
    [
        # Qwen3's 30,532,122,624 with 128 more rows of both tables; the report has 540 and 650 million for the towers.
        ("Qwen3-Omni-30B-A3B", 30532646912, 0.54e9, 0.65e9),
        # Qwen2.5-7B's, and what Qwen2.5-VL-7B's 8,292,166,656 have beside them; Whisper-large's encoder.
        ("Qwen2.5-Omni-7B", 7615616512, 676550144, 0.637e9),
    ],
)
def test_parameters(name, text, vision, audio):
    counts = {kind: count(found.values()) for kind, found in shapes(MODELS[name]).items()}
    assert counts["text"] == text
    assert counts["vision"] == pytest.approx(vision, rel=0.02)
    assert counts["audio"] == pytest.approx(audio, rel=0.02)


def test_a_changed_config_is_lowered_to_where_it_came_from():
    whole = MODELS["Qwen3-Omni-30B-A3B"] | {"tie_word_embeddings": True, "dtype": "bfloat16", "talker_config": {"a": 1}}
    lifted = lift_thinker(whole)
    assert lifted["tie_word_embeddings"] is False  # the outer one is not the thinker's
    assert lift_thinker(lifted) is lifted
    assert lower_thinker(lifted) == whole
    text = lifted["text_config"] | {"vocab_size": 5}
    lowered = lower_thinker({key: value for key, value in lifted.items() if key != "dtype"} | {"text_config": text})
    assert lowered["thinker_config"]["text_config"] == text
    changed = {"thinker_config": whole["thinker_config"] | {"text_config": text}}
    assert lowered == {key: value for key, value in whole.items() if key != "dtype"} | changed
    assert lower_thinker(lifted | {"quantization_config": {}}) == whole | {"quantization_config": {}}


@pytest.mark.parametrize("name", MODELS)
def test_a_head_is_found_in_what_is_saved(name: str) -> None:
    """By the name of the whole model, also where the hub has another than transformers."""
    saved = lower_thinker(add_score_head(lift_thinker(MODELS[name]), 3, pad_token_id=0))
    kind = "Qwen2_5Omni" if "2.5" in name else "Qwen3OmniMoe"
    assert saved["architectures"] == [f"{kind}ForSequenceClassification"]
    config = lift_thinker(saved)
    assert count_labels(config) == 3
    assert family_of(config).describe(config).num_labels == 3
