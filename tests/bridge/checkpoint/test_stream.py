"""Weights as a rollout engine gets them: bit for bit those of the files, on every rank, whatever the layout."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.bridge.families import ACCOUNTED, EP, ETP, PP, SP, TP, VPP
from tests.torchrun import torchrun

pytestmark = pytest.mark.slow

LORA = {"tuner_type": "lora", "lora_rank": 3, "lora_alpha": 7.0, "lora_dropout": 0.0, "target_modules": ["all-linear"]}
LAYOUTS = {
    "DP2": {},
    "TP2": {TP: 2, SP: True},
    "PP2": {PP: 2},
    "PP2 VPP2": {PP: 2, VPP: 2},
    "PP2 VPP3 accounted": {PP: 2, VPP: 3} | ACCOUNTED,
    "CP2": {"context_parallel_size": 2},
}
EXPERTS = {"EP2": {EP: 2}, "TP2 ETP2": {TP: 2, SP: True, ETP: 2}, "TP2 EP2": {TP: 2, SP: True, EP: 2}}
DENSE = [(model, name, {}) for model in ("qwen2", "qwen3") for name in LAYOUTS]
MOE = [(model, name, {}) for model in ("qwen3_moe", "gpt_oss") for name in ("PP2", *EXPERTS)]
ADAPTED = [("qwen3", name, {"lora": True}) for name in ("DP2", "TP2", "PP2")]
ADAPTED += [("qwen3_moe", name, {"lora": True}) for name in ("EP2", "TP2 ETP2")]
ROUNDED = [("qwen3_moe", "TP2 EP2", {"dtype": "bfloat16"})]
FAULTS = [("qwen2", "TP2", {"planted": "shards"}), ("qwen2", "PP2", {"planted": "first"})]
CASES = {
    " ".join([model, name, *map(str, more.values())]): (model, (LAYOUTS | EXPERTS)[name], more)
    for model, name, more in (*DENSE, *MOE, *ADAPTED, *ROUNDED, *FAULTS)
}
RIGHT = [name for name, (_, _, more) in CASES.items() if "planted" not in more]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("qwen2", "qwen3", "qwen3_moe", "gpt_oss"):
        tiny.save(root / name, name)
    return root


def launch(models: Path, folder: Path, names: list[str], processes: int) -> dict[str, dict]:
    jobs = []
    for name in names:
        model, layout, more = CASES[name]
        options = (layout if processes > 1 else {}) | (LORA if more.get("lora") else {})
        jobs.append({"name": name, "model": str(models / model), "options": options, "folder": str(folder / name)})
        jobs[-1] |= more
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    results = folder / "results.json"
    done = torchrun("tests.bridge.checkpoint.stream_worker", folder / "jobs.json", results, processes=processes)
    assert results.exists(), done.stderr[-6000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def two(models, tmp_path_factory) -> dict[str, dict]:
    return launch(models, tmp_path_factory.mktemp("two") / "jobs", list(CASES), 2)


@pytest.fixture(scope="module")
def one(models, tmp_path_factory) -> dict[str, dict]:
    names = ["qwen2 DP2", "gpt_oss PP2", "qwen3_moe EP2 True"]
    return launch(models, tmp_path_factory.mktemp("one") / "jobs", names, 1)


@pytest.mark.parametrize("name", RIGHT)
def test_every_rank_gets_the_files_tensors(name, two):
    assert (two[name]["wrong"], two[name]["orders"]) == ([], 1)


@pytest.mark.parametrize("name", RIGHT)
def test_only_what_a_rank_lacks_is_broadcast(name, two):
    assert (two[name]["broadcasts"] == 0) == ("DP2" in name or "CP2" in name)


def test_one_process(one):
    assert [found for found in one.values() if found != {"wrong": [], "orders": 1, "broadcasts": 0}] == []


@pytest.mark.parametrize("name", [name for name in CASES if name not in RIGHT])
def test_faults_are_seen(name, two):
    assert any(what.endswith("differs") for what in two[name]["wrong"]), two[name]
