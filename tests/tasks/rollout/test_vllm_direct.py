"""Weights copied directly into the tensors of vLLM in the trainer's processes, on the CPU.

An engine that was updated has, tensor by tensor, what one has that is started from the exported checkpoint.
scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip. Each launch takes up to a minute on two cores.
"""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny, tiny_vision
from tests.bridge.families import EP, PP, SP, TP
from tests.prepared import ON_CPU, ROOT
from tests.tasks.rollout.test_vllm import CLOSE, SHAPE, SHAPES
from tests.vllm_cpu import PYTHON

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]


@dataclass(frozen=True)
class Case:
    """Model and layouts. copies, transfers: at most, of a sync on one rank."""

    model: str
    processes: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1  # of an engine
    kernels: str = "plain"
    changes: dict[str, Any] = field(default_factory=dict)
    copies: int = 0
    transfers: int = 0


# Of a layer: two norms, two norms of heads, q, k and v, o, gate with up, down. Of the model: embedding, norm, output.
DENSE = 4 * 10 + 3
# Of a layer of short convolutions: two norms, the input in two, the convolution, the output, gate with up, down.
VISION = 120  # of 122 tensors
CASES = {
    "dense": Case("qwen3", copies=DENSE),
    "tied": Case("qwen3", changes={"tie_word_embeddings": True}, copies=DENSE - 1),
    "biases": Case("qwen2", changes={"hidden_size": 128}, copies=DENSE + 4),
    "experts": Case("qwen3_moe", copies=DENSE + 4),
    "experts of two ranks": Case("qwen3_moe", 2, {EP: 2}, 2, copies=DENSE + 4 + 6, transfers=2),
    "split": Case("qwen3", 2, {TP: 2, SP: True}, 2, copies=DENSE, transfers=2),
    "stages": Case("qwen3", 2, {PP: 2}, copies=DENSE, transfers=2),
    "images": Case("qwen3_vl", copies=VISION),
    "images and experts": Case("qwen3_vl_moe", copies=VISION),
    # Three of the layers have a router, its bias, and a shared expert's two matrices besides.
    "score biases": Case("glm4_moe", changes={"hidden_size": 128}, copies=DENSE + 4 + 3 * 4),
    "short convolutions": Case("lfm2", changes=SHAPES["lfm2"], copies=3 * 8 + 10 + 2),
    "repacked": Case("qwen3_moe", kernels="CPU's"),
}


@pytest.fixture(scope="module")
def launched() -> dict[str, dict[str, list]]:
    """Results of the cases so far: each is launched once, in whatever order the tests run."""
    return {}


@pytest.fixture(params=CASES)
def found(request, launched, tmp_path_factory) -> tuple[Case, dict[str, list]]:
    name, case = request.param, CASES[request.param]
    if name not in launched:
        launched[name] = launch(case, tmp_path_factory)
    return case, launched[name]


def launch(case: Case, tmp_path_factory) -> dict[str, list]:
    root = tmp_path_factory.mktemp("direct")
    for seed in (0, 1, 2):
        save(root / str(seed), case, seed)
    job = {"models": [str(root / str(seed)) for seed in (0, 1, 2)], "vision": case.model.startswith("qwen3_vl")}
    job |= {"options": case.options, "ranks": case.ranks, "kernels": case.kernels}
    (root / "job.json").write_text(json.dumps(job))
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(case.processes), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.tasks.rollout.direct_worker"]
    done = subprocess.run(
        [*command, root / "job.json", root / "results.json"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ON_CPU,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(Path(root / "results.json").read_text())


def save(folder: Path, case: Case, seed: int) -> None:
    if case.model.startswith("qwen3_vl"):
        tiny_vision.qwen3_vl(folder, moe=case.model.endswith("moe"), seed=seed, head_dim=32)
    else:
        model = tiny.model(case.model, seed=seed, **SHAPE | case.changes)
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)))
        model.save_pretrained(folder)
        tiny.save_tokenizer(folder)


def test_an_updated_engine_is_one_that_is_started_from_the_checkpoint(found):
    """After the first update by copies, and after the next."""
    case, results = found
    assert results["differ"] == [[[], []]] * case.processes
    assert results["buckets"] == [[]] * case.processes  # by a server's worker, in buckets
    if "greedy" in results:
        assert all(results["greedy"])
        assert max(results["log_probs"]) < CLOSE


def test_only_the_first_update_is_by_loaders(found):
    case, results = found
    if case.kernels != "plain":
        assert results["ways"] == [["loaders"] * 3]
        assert results["problem"] != [None]
        return
    assert results["problem"] == [None] * case.processes
    assert results["ways"] == [["loaders", "direct", "direct"]] * case.processes
    assert min(compared[-1] for compared in results["compared"]) > 8


def test_a_sync_makes_few_copies_and_transfers(found):
    """Else its time would grow with the number of experts."""
    case, results = found
    if case.kernels == "plain":
        assert max(results["copies"]) <= case.copies
        assert results["transfers"] == [case.transfers] * case.processes


def test_other_values_than_were_sent_are_seen(found):
    """On every rank, though one alone has them."""
    case, results = found
    if case.kernels == "plain":
        assert all("is not what was sent" in fault for fault in results["fault"])
        assert all(f"rank {case.processes - 1} " in fault for fault in results["fault"])
