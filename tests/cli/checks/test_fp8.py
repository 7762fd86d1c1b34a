"""Unusable FP8 flags are refused with flag, value and fix, as are lengths that FP8 matrix products do not support."""

from pathlib import Path

import pytest
from megaswift.bridge.options import BuildOptions
from megaswift.cli.flags import UsageError
from megaswift.tasks.run.planning import length_multiple

from tests.cli.checks.test_checks import CP, SP, TP, check

FP8 = "--fp8_format hybrid"


@pytest.mark.parametrize(
    ("words", "gpus", "message"),
    [
        ("--fp8_param_gather true", 1, "--fp8_param_gather true needs --fp8_format. Set it, as in --fp8_format"),
        ("--first_last_layers_bf16 true", 1, "--first_last_layers_bf16 true needs --fp8_format"),
        ("--fp8_recipe blockwise", 1, "--fp8_recipe blockwise needs --fp8_format"),
        (
            f"{FP8} --transformer_impl local",
            1,
            f"{FP8} cannot be used with --transformer_impl local:",
        ),
        (FP8, 0, f"{FP8} needs a GPU, and none is visible. Remove it."),
        (f"{FP8} --torch_dtype float16", 1, f"{FP8} cannot be used with --torch_dtype float16:"),
        (
            f"{FP8} --first_last_layers_bf16 true",
            1,
            "--fp8_recipe delayed cannot be used with --first_last_layers_bf16 true. Set --fp8_recipe tensorwise or",
        ),
        (
            f"{FP8} --recompute_modules core_attn layernorm",
            1,
            "--fp8_recipe delayed cannot be used with --recompute_modules layernorm.",
        ),
        (
            f"{FP8} --fp8_param_gather true --fp8_recipe mxfp8",
            1,
            "cannot be used with --fp8_recipe mxfp8 in this version.",
        ),
        (
            f"{FP8} --fp8_param_gather true --use_distributed_optimizer false",
            1,
            "--fp8_param_gather true needs the main parameters of",
        ),
        (
            f"{FP8} --fp8_param_gather true --optimizer sgd",
            1,
            "--fp8_param_gather true needs the main parameters of",
        ),
        (f"{FP8} --fp8_amax_history_len 0", 1, "--fp8_amax_history_len 0: must be above 0."),
        (
            f"{FP8} --packing true --max_length 1000",
            1,
            "--max_length 1000: not a multiple of 16 with --fp8_format (--fp8_recipe delayed). Set 992.",
        ),
        (
            f"{FP8} --fp8_recipe blockwise --packing true --max_length 1000",
            1,
            "--max_length 1000: not a multiple of 128",
        ),
    ],
)
def test_what_cannot_be(dense: Path, words: str, gpus: int, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check(dense, words, gpus=gpus)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        f"{FP8} --fp8_param_gather true --max_length 1000",  # rows that are no packs are padded
        f"{FP8} --fp8_recipe blockwise --first_last_layers_bf16 true --packing true --max_length 1024",
        f"{FP8} --fp8_recipe tensorwise --recompute_modules layernorm",
    ],
)
def test_what_can_be(dense: Path, words: str) -> None:
    assert check(dense, words, gpus=1)[1] == []


def test_a_dry_run_needs_no_gpu(dense: Path) -> None:
    assert check(dense, f"{FP8} --dry_run true")[1] == []


def test_packs_of_a_layout(dense: Path) -> None:
    layout = f"{TP} 2 {SP} {CP} 2 {FP8} --packing true --max_length"
    assert check(dense, f"{layout} 1024", world=4, gpus=4)[1] == []
    with pytest.raises(UsageError) as error:
        check(dense, f"{layout} 1040", world=4, gpus=4)
    assert f"16 with --fp8_format (--fp8_recipe delayed) x {TP} 2 under {SP} x {CP} 2. Set 1024." in str(error.value)


@pytest.mark.parametrize(
    ("flags", "multiple"),
    [
        ({}, 1),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, 4),
        ({"fp8_format": "e4m3"}, 16),
        ({"fp8_format": "e4m3", "tensor_model_parallel_size": 4}, 16),
        ({"fp8_format": "e4m3", "tensor_model_parallel_size": 4, "sequence_parallel": True}, 64),
        ({"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, 16),
        ({"fp8_format": "hybrid", "fp8_recipe": "blockwise"}, 128),
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, 32),
    ],
)
def test_tokens_of_a_process(flags: dict, multiple: int) -> None:
    assert length_multiple(BuildOptions(**flags)) == multiple
