"""Checks of --vllm_enable_lora true, which sends only adapters to vLLM."""

from dataclasses import replace
from pathlib import Path

import pytest
from megaswift.cli.checks.common import check_rollout
from megaswift.cli.checks.vllm_lora import check_vllm_lora
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.tasks.rollout.serve import choose_backend

from tests.cli.checks.checking import check, install, refusal
from tests.cli.conftest import DENSE, write_model

LORA = "--tuner_type lora --global_batch_size 8 --vllm_enable_lora true"
SERVED = f"{LORA} --vllm_mode server"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--vllm_enable_lora true",
            "--vllm_enable_lora true: only for --tuner_type lora, and all weights are trained.",
        ),
        ("--vllm_max_lora_rank 8", "--vllm_max_lora_rank 8: only for --vllm_enable_lora true. Remove it."),
        (f"{LORA} --vllm_max_lora_rank 0", "--vllm_max_lora_rank 0: must be at least 1 and"),
        (f"{LORA} --use_vllm false", "--vllm_enable_lora true: only for vLLM, and --use_vllm false is set. Remove it."),
        (f"{LORA}", "--vllm_enable_lora true: only for vLLM, and it is not installed here."),
        (f"{SERVED} --vllm_max_lora_rank 8", "--vllm_max_lora_rank 8: read by a server when it starts. Set it for"),
        (f"{SERVED} --sleep_level 2", "--vllm_enable_lora true cannot be used with --sleep_level 2, which discards"),
        (f"{SERVED} --use_dora true", "--vllm_enable_lora true: vLLM does not support DoRA. Remove one of them."),
        (f"{SERVED} --lora_bias all --target_modules linear_qkv", "trained biases (--lora_bias all)"),
        (f"{SERVED} --modules_to_save lm_head", "--vllm_enable_lora true: vLLM does not"),
        (f"{SERVED} --target_modules all-embedding", "adapters of the embedding or the output layer"),
    ],
)
def test_refused(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm=False)
    biased = write_model(tmp_path / "model", DENSE | {"attention_bias": True, "tie_word_embeddings": False})
    if "--global_batch_size" not in words:
        words += " --global_batch_size 8"
    assert message in refusal(biased, words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{LORA} --lora_rank 32 --vllm_max_lora_rank 16", "--vllm_max_lora_rank 16: less than --lora_rank 32. Remove"),
        (f"{LORA} --lora_rank 12 --target_modules all-linear", "adapters of experts of rank 12: its kernel takes 1, 8"),
    ],
)
def test_refused_in_the_process(words: str, message: str, mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm=True)
    assert message in refusal(mixture, words)


def test_weights_that_vllm_does_not_read(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm=True)
    options, _ = check(dense, f"{LORA} --reward_funcs accuracy")
    with pytest.raises(UsageError, match="cannot be used with --mcore_model x: vLLM reads the base weights"):
        check_vllm_lora(replace(options, mcore_model="x"), DENSE)


def test_quantised(tmp_path: Path) -> None:
    config = DENSE | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    assert "--vllm_enable_lora true cannot be" in refusal(write_model(tmp_path / "fp8", config), SERVED)


@pytest.mark.parametrize("words", [LORA, SERVED, f"{LORA} --vllm_max_lora_rank 64 --use_rslora true --lora_rank 12"])
def test_taken(words: str, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm=True)
    options, _ = check(dense, f"{words} --reward_funcs accuracy")
    assert options.engine.vllm_enable_lora


def test_servers(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rollout(words: str):
        return read_options("swift", ["rollout", "--model", str(dense), *words.split()])[0]

    check_rollout(rollout("--vllm_enable_lora true --vllm_max_lora_rank 64"))
    with pytest.raises(UsageError, match="--vllm_max_lora_rank 64: only for --vllm_enable_lora true"):
        check_rollout(rollout("--vllm_max_lora_rank 64"))
    install(monkeypatch, vllm=False)
    with pytest.raises(ValueError, match="transformers cannot load adapters separately"):
        choose_backend(rollout("--vllm_enable_lora true"))
