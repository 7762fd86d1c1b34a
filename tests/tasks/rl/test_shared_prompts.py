"""A prompt that its completions share in a row gives each of them the numbers of a document by itself."""

import numpy as np
import pytest

from tests.tasks.shared_prompt_jobs import EP2, PP2, RECOMPUTED, TP2, Job, run_jobs

ROWS = {"packing": None, "micro_batch": 3}
RUNS = {
    "qwen3": Job(1, "qwen3"),
    "rows": Job(1, "qwen3", settings=ROWS),
    "window": Job(1, "mistral", {"sliding_window": 9}),
    "experts": Job(1, "qwen3_moe"),
    "latent attention": Job(1, "deepseek_v2"),
    "sinks and windows": Job(1, "gpt_oss"),
    "chunks": Job(1, "llama4_text"),
    "two ropes": Job(1, "gemma3_text", settings=ROWS),
    "recomputed": Job(1, "llama", flags=RECOMPUTED),
    "DP2, rows": Job(2, "qwen3", settings=ROWS | {"micro_batch": 2}),
    "TP2 SP": Job(2, "qwen3", flags=TP2),
    "PP2": Job(2, "qwen3", flags=PP2, settings=ROWS),
    "EP2": Job(2, "qwen3_moe", flags=EP2),
}
FAULTS = {fault: Job(1, "qwen3", settings={"fault": fault}) for fault in ("no prompt", "each other")}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_jobs(RUNS | FAULTS, "tests.tasks.rl.shared_prompts_worker", tmp_path_factory.mktemp("shared"))


def largest_difference(result: dict) -> float:
    pairs = zip(result["repeated"]["log_probs"], result["shared"]["log_probs"], strict=True)
    return max(float(np.abs(np.subtract(*pair)).max()) for pair in pairs)


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_those_of_documents_by_themselves(name, results):
    result = results[name]
    assert "error" not in result, result["error"]
    repeated, shared = result["repeated"], result["shared"]
    assert repeated["shares"] == 0 < shared["shares"]
    if RUNS[name].processes == 1:  # else the ranks have other documents
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
