"""Pairs whose answers share their prompt in a row have the numbers of documents by themselves."""

import json

import numpy as np
import pytest

from tests import tiny
from tests.tasks.rl.test_shared_prompts import EP2, PP2, RECOMPUTED, TP2
from tests.torchrun import torchrun

ROWS = {"packing": None, "micro_batch": 1}
# name: (processes, family, changes of its config, flags, further settings of the job)
RUNS = {
    "packed": (1, "qwen3", {}, {}, {}),
    "rows": (1, "qwen3", {}, {}, ROWS),
    "window, recomputed": (1, "mistral", {"sliding_window": 9}, RECOMPUTED, {}),
    "experts": (1, "qwen3_moe", {}, {}, {}),
    "DP2": (2, "qwen3", {}, {}, {}),
    "TP2 SP": (2, "qwen3", {}, TP2, {}),
    "PP2": (2, "qwen3", {}, PP2, ROWS),
    "EP2": (2, "qwen3_moe", {}, EP2, {}),
}
FAULTS = {
    fault: (1, "qwen3", {}, {}, {"fault": fault}) for fault in ("no prompt", "each other", "no loss of the prompt")
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, results = tmp_path_factory.mktemp("pairs"), {}
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
        done = torchrun("tests.tasks.preference.shared_prompts_worker", folder / "jobs.json", output, processes=world)
        assert output.exists(), f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        results |= json.loads(output.read_text())
    return results


def largest_difference(result: dict) -> float:
    """Largest difference of log-probabilities beside the largest of them."""
    repeated, shared = (np.array(result[name]["log_probs"]) for name in ("repeated", "shared"))
    return float(np.abs(shared - repeated).max() / np.abs(repeated).max())


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_those_of_documents_by_themselves(name, results):
    result = results[name]
    assert "error" not in result, result["error"]
    repeated, shared = result["repeated"], result["shared"]
    assert repeated["shares"] == 0 < shared["shares"]
    if RUNS[name][0] == 1:  # else the ranks have other pairs
        assert shared["tokens"] == repeated["tokens"]
        assert repeated["forward"] - shared["forward"] == result["saved"]
    assert shared["computed"] < repeated["computed"]
    assert largest_difference(result) < 1e-6
    assert result["gradients"] < 3e-6


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name, results):
    result = results[name]
    assert "error" not in result, result["error"]
    assert largest_difference(result) > 0.01
    assert result["gradients"] > 0.01
