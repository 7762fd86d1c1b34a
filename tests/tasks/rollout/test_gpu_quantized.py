"""vLLM on a GPU that quantizes weights at each update generates as one that has read and quantized the same weights.

pytest -m gpu tests/tasks/rollout/test_gpu_quantized.py      # one GPU, and vLLM
"""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests import tiny
from tests.prepared import ROOT

SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_attention_heads": 4}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


def test_updates_are_quantized(tmp_path):
    folders = []
    for seed in range(2):
        folders.append(str(tmp_path / str(seed)))
        tiny.save(tmp_path / str(seed), "qwen3", seed=seed, **SHAPE)
        tiny.save_tokenizer(tmp_path / str(seed))
    (tmp_path / "job.json").write_text(json.dumps({"models": folders, "method": "fp8"}))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"),
        *("tests.tasks.rollout.quantized_worker", str(tmp_path / "job.json"), str(tmp_path / "results.json")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["again"] == results["first"]
    assert share_of_equal_tokens(results["first"], results["second"]) < 0.5
    assert min(results["compared"]) > 0
    assert results["loaded"] == results["first"]
    assert results["plain"] != results["first"]


def share_of_equal_tokens(first, second):
    return sum(one[0] == other[0] for one, other in zip(first, second, strict=True)) / len(first)
