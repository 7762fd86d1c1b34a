"""On two GPUs: `megatron rlhf --rlhf_type grpo` with vLLM over both, CUDA graphs on, as a user starts it.

pytest -m gpu tests/tasks/rollout/test_gpu.py      # two GPUs and vLLM; vLLM compiles for a minute
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.prepared import ROOT
from tests.tasks.rollout.test_vllm_runs import REWARD

# Counts the captured graphs: a run that had fallen back to eager would prove nothing.
COUNT = """
from pathlib import Path

import torch

capture = torch.cuda.CUDAGraph.capture_end


def capture_end(graph):
    capture(graph)
    with Path("captured.txt").open("a") as file:
        file.write("x")


torch.cuda.CUDAGraph.capture_end = capture_end
"""
# vLLM's attention on GPUs takes heads of 64.
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_attention_heads": 4}
LINE = (
    "rlhf --rlhf_type grpo --model model --dataset prompts.jsonl --external_plugins reward.py --reward_funcs sum "
    "--vllm_mode colocate --vllm_tensor_parallel_size 2 --vllm_max_model_len 256 --vllm_max_num_seqs 16 "
    "--num_generations 4 --global_batch_size 8 --micro_batch_size 4 --max_completion_length 16 --train_iters 2 "
    "--lr 1e-4 --beta 0 --logging_steps 1 --max_sampling_logp_difference 0.1 --add_version false "
    "--dataloader_num_workers 0 --output_dir out"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for family in ("qwen3", "qwen3_moe"):
        tiny.save(root / family, family, **SHAPE)
        tiny.save_tokenizer(root / family)
    rows = [{"messages": [{"role": "user", "content": f"say {number}"}]} for number in range(16)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text(REWARD + COUNT)
    return root


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", "--tensor_model_parallel_size 2 --sequence_parallel true"),
        ("qwen3_moe", "--expert_model_parallel_size 2 --tuner_type lora --lora_rank 8 --target_modules all-linear"),
    ],
)
def test_an_engine_over_two_gpus_captures_graphs(family, layout, folder):
    """The launcher's expandable segments, vLLM's sleep mode and its all-reduce of captured graphs go together."""
    line = LINE.replace("--model model", f"--model {family}").replace("--output_dir out", f"--output_dir {family}-run")
    captured = folder / "captured.txt"
    captured.write_text("")
    environment = os.environ | {
        "NPROC_PER_NODE": "2",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "megaswift.cli.main", "megatron", *line.split(), *layout.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-5000:]
    assert "CUDA Error" not in printed
    assert captured.read_text(), printed[-5000:]
    steps = [json.loads(line) for line in (folder / f"{family}-run" / "logging.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == [1, 2]
