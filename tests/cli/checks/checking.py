"""Checks of RL command lines, as `megatron` makes them before a run."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from megaswift.cli.checks.common import check_training
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.tasks.run.planning import ProcessLayout


def check(model: Path, words: str, *, world: int = 1, kind: str = "grpo") -> tuple[Any, list[str]]:
    line = ["rlhf", "--rlhf_type", kind, "--model", str(model), "--dataset", "d", "--train_iters", "1", *words.split()]
    options, sources, _ = read_options("megatron", line)
    return options, check_training(
        options, ProcessLayout.of(options.build, world), gpus=0, processes=world, sources=sources
    )


def install(monkeypatch: pytest.MonkeyPatch, *, vllm: bool) -> None:
    """Pretend that vLLM is installed, or is not."""
    find, spec = importlib.util.find_spec, importlib.util.spec_from_loader("vllm", None) if vllm else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: spec if name == "vllm" else find(name, *more))


def refusal(model: Path, words: str, *, world: int = 1) -> str:
    if "--reward_funcs" not in words:
        words = f"--reward_funcs accuracy {words}"
    with pytest.raises(UsageError) as error:
        check(model, words, world=world)
    return str(error.value)
