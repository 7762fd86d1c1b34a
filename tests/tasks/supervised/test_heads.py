"""Heads, embeddings and choices in many layouts against transformers, sentence-transformers and PEFT."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.bridge.families import CP, EP, ETP, PP, SP, TP, VPP
from tests.torchrun import torchrun

BOUND = 1e-4  # relative
SEEN = 1e-2  # how far a fault has to move outputs or gradients
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {
        "TP2": {TP: 2, SP: False},
        "TP2 SP": {TP: 2, SP: True},
        "PP2": {PP: 2},
        "PP2 VPP2": {PP: 2, VPP: 2},
        "CP2": {CP: 2},
        "DP2": {},
        "EP2": {EP: 2},
        "TP2 SP EP2": {TP: 2, SP: True, EP: 2, ETP: 1},
    },
    4: {"TP2 CP2 SP": {TP: 2, CP: 2, SP: True}, "TP2 SP PP2": {TP: 2, SP: True, PP: 2}},
}
DENSE = ("one process", "TP2", "TP2 SP", "PP2", "CP2", "DP2")
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "qwen3": ("qwen3", {}, (*DENSE, "PP2 VPP2", "TP2 CP2 SP", "TP2 SP PP2")),
    "tied": ("llama", {"tie_word_embeddings": True}, DENSE),
    "experts": ("qwen3_moe", {}, ("one process", "PP2", "EP2", "TP2 SP EP2", "CP2")),
    "gemma": ("gemma3_text", {}, ("one process",)),  # tied, and its class has another name
    "hybrid": ("qwen3_5_text", {}, ("one process", "CP2")),  # likewise
}
KINDS = ("scores", "last", "mean", "choices", "sums")
FAULTS = [  # kind of what is asked, fault, layout
    *((kind, fault, "one process") for kind in ("scores", "last", "choices") for fault in ("place", "document")),
    ("mean", "padding", "CP2"),
    *((kind, "share", "CP2") for kind in KINDS),
    *((kind, "twice", "TP2 SP") for kind in KINDS[:4]),
]
SAVED = [("qwen3", "one process"), ("tied", "PP2"), ("experts", "TP2 SP EP2"), ("tied", "TP2")]
ADAPTED = [("qwen3", "one process"), ("tied", "TP2 SP"), ("qwen3", "PP2")]
ALIKE = ("gemma", "hybrid")  # what is asked of these is as of the others
CASES = [
    (model, layout, kind)
    for model, (*_, layouts) in MODELS.items()
    for layout in layouts
    for kind in (KINDS[:1] if model in ALIKE else KINDS)
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with every model, as reference.make leaves them."""
    from tests.tasks.supervised import reference

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("heads")
    for name, (family, changes, _) in MODELS.items():
        reference.make(folder / name, family, **changes)
    return folder


@pytest.fixture(scope="module")
def result_of(place):
    """What tests.tasks.supervised.worker found, by a job's name: one launch each number of processes."""
    done: dict[int, dict[str, dict]] = {}

    def result(name: str, layout: str) -> dict[str, Any]:
        world = next(world for world, layouts in LAYOUTS.items() if layout in layouts)
        if world not in done:
            done[world] = launch(place, world)
        found = done[world].get(name)
        assert found is not None, f"the launch stopped before: {list(done[world].values())[-1:]}"
        assert "error" not in found, found["error"]
        return found

    return result


def launch(place: Path, world: int) -> dict[str, dict]:
    jobs = []
    for layout, flags in LAYOUTS[world].items():

        def job(model: str, kind: str, what: str, flags=flags, layout=layout, **more: Any) -> dict[str, Any]:
            name = f"{model}, {layout}, {kind}, {what}"
            return {"name": name, "folder": str(place / model), "layout": flags, "kind": kind, **more}

        jobs += [job(model, kind, "") for model, where, kind in CASES if where == layout]
        jobs += [job("qwen3", kind, fault, planted=fault) for kind, fault, where in FAULTS if where == layout]
        for what, cases in (("saved", SAVED), ("adapted", ADAPTED)):
            jobs += [
                job(model, "scores", what, saved=str(folder_of(place, model, layout, what)), lora=what == "adapted")
                for model, where in cases
                if where == layout
            ]
    folder = place / f"world {world}"
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ended = torchrun("tests.tasks.supervised.worker", folder / "jobs.json", folder / "results.json", processes=world)
    assert (folder / "results.json").exists(), ended.stdout[-2000:] + ended.stderr[-6000:]
    return json.loads((folder / "results.json").read_text())


def folder_of(place: Path, model: str, layout: str, what: str) -> Path:
    return place / f"{model} {layout} {what}"


def several_long(cases: list[tuple]) -> list:
    """Of cases that name a layout, those in several processes are long: their launches take more than a minute."""
    return [pytest.param(*case, marks=() if "one process" in case else pytest.mark.long) for case in cases]


@pytest.mark.parametrize(("model", "layout", "kind"), several_long(CASES))
def test_computes_as_transformers_does(model, layout, kind, result_of):
    result = result_of(f"{model}, {layout}, {kind}, ", layout)
    assert result["alike"]
    assert result["outputs"] < BOUND
    assert result["gradients"] < BOUND, result["worst"]


@pytest.mark.parametrize(("kind", "fault", "layout"), several_long(FAULTS))
def test_faults_are_seen(kind, fault, layout, result_of):
    result = result_of(f"qwen3, {layout}, {kind}, {fault}", layout)
    assert max(result["outputs"], result["gradients"]) > SEEN


@pytest.mark.parametrize(("model", "layout"), several_long(SAVED))
def test_saved_models_score_alike_elsewhere(model, layout, place, result_of):
    from transformers import AutoModelForSequenceClassification

    result = result_of(f"{model}, {layout}, scores, saved", layout)
    assert result["alike"]  # by way of megatron-core's format as well
    folder = folder_of(place, model, layout, "saved")
    before, after = tensors_of(place / model / "scored"), tensors_of(folder / "scored")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (folder / "scored" / "config.json").read_text() == (place / model / "scored" / "config.json").read_text()
    for name in ("scored", "begun"):
        theirs, about = AutoModelForSequenceClassification.from_pretrained(
            folder / name, attn_implementation="eager", output_loading_info=True
        )
        assert not any(about[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert theirs.config.num_labels == 3
        assert distance(result[name], scores_of(theirs)) < BOUND


@pytest.mark.parametrize(("model", "layout"), several_long(ADAPTED))
def test_adapters_beside_heads_are_pefts(model, layout, place, result_of):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    result = result_of(f"{model}, {layout}, scores, adapted", layout)
    assert result["alike"]  # when read again
    folder = folder_of(place, model, layout, "adapted")
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    assert config["modules_to_save"] == ["score"]
    base = AutoModelForSequenceClassification.from_pretrained(
        place / model / "causal", num_labels=3, attn_implementation="eager"
    )
    theirs = PeftModel.from_pretrained(base, str(folder / "adapter"))
    assert distance(result["scores"], scores_of(theirs)) < BOUND
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "merged", attn_implementation="eager")
    assert distance(result["scores"], scores_of(merged)) < BOUND


@pytest.mark.long
def test_new_heads_begin_alike_everywhere(place, result_of):
    found = []
    for model, layout in SAVED:
        result_of(f"{model}, {layout}, scores, saved", layout)
        found.append(tensors_of(folder_of(place, model, layout, "saved") / "begun")["score.weight"])
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert 0.015 < found[0].std() < 0.025  # initializer_range
    assert abs(found[0].mean()) < 0.005


def scores_of(model: Any) -> torch.Tensor:
    """[documents, labels]"""
    from tests.bridge.families.reference import documents

    model.eval()
    with torch.no_grad():
        ids = [torch.from_numpy(ids)[None] for pack in documents() for ids, _ in pack]
        return torch.cat([model(each, use_cache=False).logits for each in ids])


def distance(found: Any, wanted: torch.Tensor) -> float:
    return ((torch.tensor(found) - wanted).abs().max() / wanted.abs().max()).item()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
