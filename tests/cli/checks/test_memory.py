"""Options of host memory and of the optimizer's types that cannot be used together, or that nothing would read."""

from pathlib import Path

import pytest
from megaswift.cli.flags import UsageError

from tests.cli.checks.checking import check as check_rl
from tests.cli.checks.test_checks import check

HOST, ACTIVATIONS = "--optimizer_cpu_offload true", "--cpu_offloading true --cpu_offloading_num_layers 2"
FP8 = "--fp8_format e4m3 --fp8_recipe tensorwise"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{HOST} --optimizer sgd", f"{HOST} cannot be used with --optimizer sgd: only AdamW has such states."),
        ("--exp_avg_dtype bf16 --optimizer sgd", "--exp_avg_dtype bf16 cannot be used with --optimizer sgd:"),
        ("--main_params_dtype fp16 --optimizer sgd", "--main_params_dtype fp16 cannot be used with --optimizer sgd:"),
        (
            "--optimizer_offload_fraction 0.5",
            "--optimizer_offload_fraction 0.5: only for --optimizer_cpu_offload true.",
        ),
        (
            f"{HOST} --optimizer_offload_fraction 1.5",
            "--optimizer_offload_fraction 1.5: must be at least 0 and at most",
        ),
        ("--cpu_offloading_num_layers 2", "--cpu_offloading_num_layers 2: only for --cpu_offloading true. Set it, or"),
        ("--cpu_offloading true", "--cpu_offloading true needs the number of layers. Set --cpu_offloading_num_layers"),
        (
            f"{ACTIVATIONS} --recompute_modules core_attn layernorm",
            "--cpu_offloading true cannot be used with --recompute_modules layernorm, whose output is discarded.",
        ),
    ],
)
def test_refused(words: str, message: str, dense: Path) -> None:
    with pytest.raises(UsageError) as error:
        check(dense, words)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{HOST} {FP8} --fp8_param_gather true", f"{HOST} cannot be used with --fp8_param_gather true. Remove one"),
        (
            f"--exp_avg_dtype bf16 --main_params_dtype fp16 {FP8} --fp8_param_gather true",
            "--main_params_dtype fp16 cannot be used with --fp8_param_gather true. Remove one",
        ),
        (f"{ACTIVATIONS} {FP8}", "--cpu_offloading true cannot be used with --fp8_format e4m3, whose layers save"),
    ],
)
def test_refused_with_fp8(words: str, message: str, dense: Path) -> None:
    with pytest.raises(UsageError) as error:
        check(dense, words, gpus=1)
    assert message in str(error.value)


def test_moments_of_weights_in_fp8_may_be_narrow(dense: Path) -> None:
    check(dense, f"--exp_avg_dtype bf16 --exp_avg_sq_dtype fp8 {FP8} --fp8_param_gather true", gpus=1)


@pytest.mark.parametrize("fraction", [0.5, 1])
def test_what_is_left_of_the_state_may_move(fraction: float, dense: Path) -> None:
    flags = f"{HOST} --optimizer_offload_fraction {fraction} --offload_optimizer true"
    check_rl(dense, f"--reward_funcs accuracy {flags} --use_vllm false")


@pytest.mark.parametrize(
    "words",
    [
        HOST,
        f"{HOST} --optimizer_offload_fraction 0.5 --exp_avg_dtype bf16 --exp_avg_sq_dtype fp8 --main_params_dtype fp16",
        "--use_precision_aware_optimizer true --exp_avg_dtype fp8",
        ACTIVATIONS,
        "--optimizer_cpu_offload false --optimizer_offload_fraction 1.0",
    ],
)
def test_accepted(words: str, dense: Path) -> None:
    check(dense, words)
