"""What heads and embeddings leave in files, and what of them is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megaswift.bridge.checkpoint.adapter_files import read_num_labels
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.sentence_transformers import sentence_transformers_files
from megaswift.bridge.families import FAMILIES, family_of
from megaswift.bridge.families.sequence_classification import count_labels
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.score_head import add_score_head
from megaswift.bridge.options import BuildOptions
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.bridge import families

pytestmark = pytest.mark.slow
# Names by transformers' rule, which has no such classes.
TOWER_CLASSIFIERS = {
    "qwen2_5_vl_text": "Qwen2VLForSequenceClassification",
    "qwen3_vl_text": "Qwen3VLForSequenceClassification",
    "qwen3_vl_moe_text": "Qwen3VLMoeForSequenceClassification",
    "glm4v_text": "Glm4vForSequenceClassification",
    "glm4v_moe_text": "Glm4vMoeForSequenceClassification",
    "qwen3_asr": "Qwen3ASRForSequenceClassification",
    "qwen2_5_omni_text": "Qwen2_5OmniForSequenceClassification",
    "qwen3_omni_moe_text": "Qwen3OmniMoeForSequenceClassification",
}
TEXTS = ["What is 7 + 15?", "A capital", "user assistant system", "é, and what BPE makes of it: twenty-two, or so"]


@pytest.fixture(scope="module")
def causal(tmp_path_factory) -> Path:
    folder = tiny.save(tmp_path_factory.mktemp("files") / "causal", "qwen3")
    tiny.save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_configs_with_heads_are_transformers_own(family):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    variants = families.tinies()
    settings = variants.get(family.name, variants.get(f"{family.name} Lite"))
    assert settings is not None
    config = settings.config().to_dict() | {"architectures": list(family.architectures)[:1]}
    classifiers = AutoModelForSequenceClassification._model_mapping
    is_known = type(settings.config()) in classifiers
    if not is_known and family.name not in TOWER_CLASSIFIERS:
        with pytest.raises(ValueError, match=f"no sequence classification for {config['model_type']} models"):
            add_score_head(config, 5)
        return
    made = add_score_head(config, 5, "multi_label_classification")
    theirs = AutoConfig.for_model(**made)
    assert theirs.num_labels == count_labels(made) == 5
    assert theirs.problem_type == "multi_label_classification"
    if is_known:
        assert made["architectures"] == [classifiers[type(settings.config())].__name__]
    else:
        assert made["architectures"] == [TOWER_CLASSIFIERS[family.name]]
    about = family_of(made).describe(made)
    assert (about.num_labels, about.tied) == (5, False)
    assert family_of(made).name == family.name
    changed = {"architectures", "id2label", "label2id", "problem_type", "num_labels"}
    assert {key: made[key] for key in config.keys() - changed} == {key: config[key] for key in config.keys() - changed}


def test_paddings_of_new_heads():
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "eos_token_id": [5, 6]}
    assert add_score_head(config, 2)["pad_token_id"] == 5
    assert add_score_head(config, 2, pad_token_id=9)["pad_token_id"] == 9
    assert add_score_head(config | {"pad_token_id": 0}, 2, pad_token_id=9)["pad_token_id"] == 0


def test_another_number_of_labels_is_refused():
    config = add_score_head({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, 3)
    assert add_score_head(config, 3) == config
    with pytest.raises(ValueError, match="--num_labels 4: the model already has a head with 3 labels"):
        add_score_head(config, 4)


def test_a_head_that_is_lost_is_missed(alone, causal, tmp_path):
    folder = tmp_path / "scored"
    shutil.copytree(causal, folder)
    config = add_score_head(read_config(causal), 3)
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(config, BuildOptions(), torch.float32)
    with pytest.raises(ValueError, match=r"lacks 1 tensor \(score.weight\)"):
        load_weights(model.chunks, config, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": torch.ones(4, 48)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"score.weight has shape \[4, 48\]"):
        load_weights(model.chunks, config, folder)


@pytest.mark.parametrize("name", ["gemma3_text within", "qwen3_5_text within"])
def test_heads_within_vision_language_checkpoints(name, alone, tmp_path):
    from transformers import AutoModelForSequenceClassification

    from tests.bridge.families.reference import make
    from tests.tasks.supervised import worker
    from tests.tasks.supervised.test_heads import distance, scores_of

    make(tmp_path, families.tinies()[name])
    config = add_score_head(read_config(tmp_path / "fp32"), 3)
    model = worker.open_model(tmp_path / "fp32", config, BuildOptions())
    scores = worker.step(model, model.chunks, "scores", backward=False)
    worker.saved(model, config, tmp_path / "fp32", tmp_path / "out")
    theirs, about = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True, ignore_mismatched_sizes=True
    )
    text = ("language_model", "score")  # of the tower there is but a part
    assert not [key for key in about["missing_keys"] if any(word in key for word in text)]
    assert distance(scores, scores_of(theirs)) < 1e-4


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers_embed_alike(pooling, normalize, alone, causal, tmp_path):
    from sentence_transformers import SentenceTransformer

    folder = tmp_path / "model"
    shutil.copytree(causal, folder)
    sentence_transformers_files(folder, pooling, normalize, dims=[16, 8])
    theirs = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    ours = embeddings_of(folder, theirs.tokenizer, pooling)
    ours = torch.nn.functional.normalize(ours) if normalize else ours
    found = theirs.encode(TEXTS, convert_to_tensor=True, batch_size=3)
    assert (found - ours).abs().max() / ours.abs().max() < 1e-5
    other = embeddings_of(folder, theirs.tokenizer, "mean" if pooling == "last" else "last")
    assert (found - other).abs().max() / ours.abs().max() > 1e-2
    assert json.loads((folder / "config.json").read_text())["matryoshka_dimensions"] == [8, 16]
    cut = theirs.encode(TEXTS, convert_to_tensor=True, truncate_dim=8)
    assert torch.allclose(cut, found[:, :8], atol=1e-5)


@torch.no_grad()
def embeddings_of(folder: Path, tokenizer: Any, pooling: str) -> torch.Tensor:
    from megaswift.templates.batching.collator import BatchLayout

    from tests.tasks.supervised import worker

    model = worker.open_model(folder, read_config(folder), BuildOptions())
    pack = [(ids, torch.zeros(len(ids)).numpy()) for ids in (tokenizer(text).input_ids for text in TEXTS)]
    batch = BatchLayout().batch([pack], 1.0)
    return worker.forward(model, pooling, batch)


def test_adapters_tell_their_labels(tmp_path):
    save_file({"base_model.model.score.weight": torch.ones(4, 8)}, tmp_path / "adapter_model.safetensors")
    assert read_num_labels(tmp_path) == 4
    save_file({"base_model.model.other.weight": torch.ones(4, 8)}, tmp_path / "adapter_model.safetensors")
    assert read_num_labels(tmp_path) is None


def test_what_adapters_of_heads_refuse(alone, causal):
    from megaswift.bridge.lora.attach import attach_adapters

    from tests.tasks.supervised.worker import LORA, open_model

    config = add_score_head(read_config(causal), 3)
    model = open_model(causal, config, BuildOptions(), adapters=True)
    with pytest.raises(ValueError, match=r"the head \(score\) is fully trained"):
        attach_adapters(model, config, replace(LORA, targets=("all-linear", "score")), seed=1)
    with pytest.raises(ValueError, match=r"--modules_to_save lm_head: .* is embed_tokens and the head"):
        attach_adapters(model, config, replace(LORA, modules_to_save=("lm_head",)), seed=1)
    attach_adapters(
        model, config, replace(LORA, modules_to_save=("classifier", "score")), seed=1
    )  # as PEFT's files have it
    assert [entry.hf for entry in model.lora.plan.modules_to_save.values()] == [("base_model.model.score.weight",)]
