"""Pairs whose answers share their prompt in a row have the numbers of documents by themselves."""

import numpy as np
import pytest

from tests.tasks.shared_prompt_jobs import EP2, PP2, RECOMPUTED, TP2, Job, run_jobs

ROWS = {"packing": None, "micro_batch": 1}
RUNS = {
    "packed": Job(1, "qwen3"),
    "rows": Job(1, "qwen3", settings=ROWS),
    "window, recomputed": Job(1, "mistral", {"sliding_window": 9}, RECOMPUTED),
    "experts": Job(1, "qwen3_moe"),
    "DP2": Job(2, "qwen3"),
    "TP2 SP": Job(2, "qwen3", flags=TP2),
    "PP2": Job(2, "qwen3", flags=PP2, settings=ROWS),
    "EP2": Job(2, "qwen3_moe", flags=EP2),
}
FAULTS = {
    fault: Job(1, "qwen3", settings={"fault": fault}) for fault in ("no prompt", "each other", "no loss of the prompt")
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_jobs(RUNS | FAULTS, "tests.tasks.preference.shared_prompts_worker", tmp_path_factory.mktemp("pairs"))


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
    if RUNS[name].processes == 1:  # else the ranks have other pairs
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
