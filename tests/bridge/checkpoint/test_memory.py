"""A conversion's memory and reading, in proportion: a checkpoint in fp32 to one in bf16."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.torchrun import torchrun

MIB = 2**20


def make(folder: Path, layers: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> int:
    """A random Qwen3 checkpoint, a file for each tensor; how many values it has."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=128,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype=dtype,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True)
    values = 0
    for number, (name, parameter) in enumerate(model.named_parameters()):
        save_file({name: torch.randn(parameter.shape).to(dtype)}, folder / f"{number}.safetensors")
        values += parameter.numel()
    config.save_pretrained(folder)
    return values


def convert(folder: Path, processes: int) -> list[dict[str, int]]:
    run = torchrun("tests.bridge.checkpoint.memory_worker", folder, processes=processes, timeout=1200, imports=True)
    assert run.returncode == 0, run.stderr[-5000:]
    shutil.rmtree(folder / "saved")
    return [json.loads((folder / f"memory-{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.long
@pytest.mark.slow
def test_memory_and_reading_in_proportion(tmp_path, monkeypatch):
    """More than 300 MiB in bf16: a copy of the whole model anywhere would show."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))  # glibc gives back what is freed; it may keep 100 MiB else
    values = make(tmp_path / "source", layers=9, hidden=1024, vocabulary=32001, dtype=torch.float32)
    assert 2 * values > 300 * MIB
    (alone,) = convert(tmp_path, 1)
    assert alone["held"] == 2 * values
    assert alone["peak"] < alone["held"] + 192 * MIB  # blocks of four readers, and what is first allocated or imported
    assert 4 * values <= alone["read"] < 1.01 * 4 * values
    for rank in convert(tmp_path, 2):
        assert 0.49 < rank["read"] / (4 * values) < 0.52


@pytest.mark.nosample
@pytest.mark.long
def test_two_gigabytes(tmp_path):
    values = make(tmp_path / "source", layers=14, hidden=2048, vocabulary=151936, dtype=torch.bfloat16)
    assert 2 * values > 1.9e9
    (alone,) = convert(tmp_path, 1)
    assert alone["peak"] < 2 * values + 1024 * MIB
    for rank in convert(tmp_path, 2):
        assert 0.49 < rank["read"] / (2 * values) < 0.52
        assert rank["peak"] < values + 1024 * MIB
