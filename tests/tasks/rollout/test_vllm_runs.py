"""`megatron rlhf --rlhf_type grpo` with the real vLLM, on the CPU, as a user runs it: adapters alone, or merged.

scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import tiny
from tests.bridge.checkpoint.test_vllm import PYTHON, SHAPE
from tests.prepared import ON_CPU
from tests.tasks.rollout.test_vllm_server import running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]
REWARD = """
from megaswift.tasks.rewards import reward


@reward("sum")
def of_ids(completion_ids, **columns):
    return [sum(ids) % 17 / 17 for ids in completion_ids]
"""
LINE = (
    "rlhf --rlhf_type grpo --model model --dataset prompts.jsonl --external_plugins reward.py --reward_funcs sum "
    "--tuner_type lora --lora_rank 5 --lora_alpha 10 --lora_dropout 0 --num_generations 4 --global_batch_size 8 "
    "--micro_batch_size 4 --max_completion_length 8 --train_iters 3 --lr 1e-2 --lr_decay_style constant --beta 0 "
    "--logging_steps 1 --log_completions true --max_sampling_logp_difference 1e-3 --add_version false "
    "--temperature 1 --torch_dtype float32 --dataloader_num_workers 0 --no_save_optim true --clip_grad 0"
)
ALONE = "--vllm_enable_lora true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("model", "another")):
        tiny.save(root / name, "qwen3", seed=seed, **SHAPE)
        tiny.save_tokenizer(root / name)
    rows = [{"messages": [{"role": "user", "content": f"say {number}"}]} for number in range(16)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text(REWARD)
    return root


def run(folder: Path, output: str, more: str, processes: int = 1, line: str = LINE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-m", "megaswift.cli.main", "megatron", *line.split(), "--output_dir", output, *more.split()],
        cwd=folder,
        env=os.environ | ON_CPU | {"NPROC_PER_NODE": str(processes)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def numbers(folder: Path, name: str, rows: str = "logging.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name / rows).open(encoding="utf-8")]


@pytest.fixture(scope="module")
def merged(folder) -> list[dict]:
    """Its completions."""
    done = run(folder, "merged", "--vllm_mode colocate --vllm_max_model_len 128")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return numbers(folder, "merged", "completions.jsonl")


def check(folder: Path, name: str, merged: list[dict]) -> None:
    """The same completions and losses as with the merged copy, and a fifth of the bytes at most."""
    assert [row["completion_ids"] for row in numbers(folder, name, "completions.jsonl")] == [
        row["completion_ids"] for row in merged
    ]
    steps, others = ([row for row in numbers(folder, each) if "weight_sync/gb" in row] for each in (name, "merged"))
    assert len(steps) == len(others) == 3
    for step, other in zip(steps, others, strict=True):
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
        assert step["weight_sync/gb"] < other["weight_sync/gb"] / 5
    assert steps[-1]["grad_norm"] != pytest.approx(steps[0]["grad_norm"], rel=0.01)  # of an adapter that has moved


@pytest.mark.parametrize("layout", ["", "--tensor_model_parallel_size 2", "--vllm_tensor_parallel_size 2"])
def test_in_the_process(layout: str, folder, merged) -> None:
    name = f"alone{layout.replace(' ', '-')}"
    done = run(folder, name, f"--vllm_mode colocate --vllm_max_model_len 128 {ALONE} {layout}", 2 if layout else 1)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    check(folder, name, merged)


def test_served(folder, merged) -> None:
    """And where a server has another model beneath the adapter, the run ends."""
    rooms = {"vllm_enable_lora": True, "vllm_max_lora_rank": 8, "vllm_max_model_len": 128}
    for model, name in (("model", "served"), ("another", "misled")):
        with running(folder / model, **rooms) as server:
            done = run(folder, name, f"{ALONE} --vllm_server_base_url {server.url} --vllm_server_timeout 600")
        if model == "model":
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
            check(folder, name, merged)
        else:
            assert done.returncode != 0
            assert "its engine has loaded other base weights than this run." in done.stderr


def test_granite_4_without_mamba(folder) -> None:
    """All weights, a tied output among them: behind each sync vLLM has the log-probabilities of training."""
    sizes = {"hidden_size": 128, "mamba_d_head": 32}  # its heads have a quarter of that
    variant = {"layer_types": ["full_attention"] * 4, "num_local_experts": 0, "position_embedding_type": "rope"}
    variant["tie_word_embeddings"] = True
    tiny.save(folder / "granite", "granitemoehybrid", **sizes | variant)
    tiny.save_tokenizer(folder / "granite")
    adapters = "--tuner_type lora --lora_rank 5 --lora_alpha 10 --lora_dropout 0 "
    line = LINE.replace("--model model", "--model granite").replace(adapters, "")
    done = run(folder, "hybrid", "--vllm_mode colocate --vllm_max_model_len 128", line=line)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    steps = [row for row in numbers(folder, "hybrid") if "weight_sync/gb" in row]
    assert len(steps) == 3
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 3e-4
    assert steps[-1]["grad_norm"] != pytest.approx(steps[0]["grad_norm"], rel=0.01)  # of weights that have moved
