"""A prompt that its completions share in a row gives each of them the numbers of a document by itself."""

import json

import numpy as np
import pytest

from tests import tiny
from tests.torchrun import torchrun

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EP2 = {"expert_model_parallel_size": 2}
ROWS = {"packing": None, "micro_batch": 3}
# name: (processes, family, changes of its config, flags, further settings of the job)
RUNS = {
    "qwen3": (1, "qwen3", {}, {}, {}),
    "rows": (1, "qwen3", {}, {}, ROWS),
    "window": (1, "mistral", {"sliding_window": 9}, {}, {}),
    "experts": (1, "qwen3_moe", {}, {}, {}),
    "latent attention": (1, "deepseek_v2", {}, {}, {}),
    "sinks and windows": (1, "gpt_oss", {}, {}, {}),
    "chunks": (1, "llama4_text", {}, {}, {}),
    "two ropes": (1, "gemma3_text", {}, {}, ROWS),
    "recomputed": (1, "llama", {}, RECOMPUTED, {}),
    "DP2, rows": (2, "qwen3", {}, {}, ROWS),
    "TP2 SP": (2, "qwen3", {}, TP2, {}),
    "PP2": (2, "qwen3", {}, PP2, ROWS),
    "EP2": (2, "qwen3_moe", {}, EP2, {}),
}
FAULTS = {fault: (1, "qwen3", {}, {}, {"fault": fault}) for fault in ("no prompt", "each other")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, results = tmp_path_factory.mktemp("shared"), {}
    for world in (1, 2):
        jobs = []
        for name, (processes, family, changes, options, settings) in (RUNS | FAULTS).items():
            if processes == world:
                model = folder / f"{family} {changes}"
                if not model.exists():
                    tiny.save(model, family, **changes)
                jobs.append({"name": name, "model": str(model), "options": options, **settings})
        (folder / "jobs.json").write_text(json.dumps(jobs))
        output = folder / f"results-{world}.json"
        done = torchrun("tests.tasks.rl.shared_prompts_worker", folder / "jobs.json", output, processes=world)
        assert output.exists(), f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        results |= json.loads(output.read_text())
    return results


def largest_difference(result: dict) -> float:
    pairs = zip(result["repeated"]["log_probs"], result["shared"]["log_probs"], strict=True)
    return max(float(np.abs(np.subtract(*pair)).max()) for pair in pairs)


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_those_of_documents_by_themselves(name, results):
    result = results[name]
    assert "error" not in result, result["error"]
    repeated, shared = result["repeated"], result["shared"]
    assert repeated["shares"] == 0 < shared["shares"]
    if RUNS[name][0] == 1:  # else the ranks have other documents
        assert shared["tokens"] == repeated["tokens"]
    assert repeated["reused"] == 0 < shared["reused"]
    assert shared["computed"] < repeated["computed"]
    assert largest_difference(result) < 2e-5
    assert result["gradients"] < 2e-5


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name, results):
    result = results[name]
    assert "error" not in result, result["error"]
    assert largest_difference(result) > 0.1
    assert result["gradients"] > 0.01
