"""Engines of tasks that generate: settings that an engine lacks, servers, offloading, a missing vLLM."""

from pathlib import Path

import pytest
from megaswift.bridge.option_groups import compose
from megaswift.cli.checks.common import check_rollout
from megaswift.cli.checks.generation import _check_offload, check_generation
from megaswift.cli.checks.teacher import check_teacher
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.tasks.options import GkdOptions, GrpoOptions

from tests.cli.checks.checking import check, install, refusal


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--vllm_mode colocate --use_vllm false",
            "--vllm_mode colocate cannot be used with --use_vllm false. Remove one of them.",
        ),
        (
            "--vllm_mode server --use_vllm false",
            "--vllm_mode server cannot be used with --use_vllm false. Remove one of them.",
        ),
        (
            "--vllm_mode colocate --vllm_server_host a b",
            "--vllm_server_host a b: only for --vllm_mode server. Remove it.",
        ),
        (
            "--vllm_mode colocate --vllm_server_base_url http://a:1",
            "--vllm_server_base_url http://a:1: only for --vllm_mode server. Remove it.",
        ),
        (
            "--use_vllm false --vllm_server_host a",
            "--vllm_server_host a: only for --vllm_mode server. Remove it.",
        ),
        ("--vllm_server_port 9000", "--vllm_server_port 9000: only for --vllm_mode server. Remove it."),
        ("--server_reconnect_timeout 10", "--server_reconnect_timeout 10.0: only for --vllm_mode server. Remove it."),
        (
            "--vllm_server_host a --server_reconnect_timeout 1800",
            "--server_reconnect_timeout 1800.0: not below --ddp_timeout 1800, which ends a run that waits. Set a "
            "higher",
        ),
        (
            "--vllm_server_host a --vllm_server_timeout 500 --ddp_timeout 400",
            "--vllm_server_timeout 500.0: not below --ddp_timeout 400, which ends a",
        ),
        ("--sleep_level 3", "--sleep_level 3: must be at least 0 and at most 2."),
        (
            "--offload_optimizer true --async_generate true --vllm_server_host a",
            "--offload_optimizer true cannot be used with --async_generate true: the model trains during generation",
        ),
        (
            "--vllm_server_host a b --vllm_server_port 1 2 3",
            "--vllm_server_host has 2 hosts and --vllm_server_port 3 ports: set one port for each host, or one of",
        ),
        ("--vllm_tensor_parallel_size 0", "--vllm_tensor_parallel_size 0: must be at least 1."),
        ("--vllm_gpu_memory_utilization 1.5", "--vllm_gpu_memory_utilization 1.5: must be above 0 and at most 1."),
    ],
)
def test_engines(words: str, message: str, dense: Path) -> None:
    assert message in refusal(dense, f"{words} --global_batch_size 8")


@pytest.mark.parametrize(
    "given",
    [
        "--vllm_tensor_parallel_size 2", "--vllm_max_model_len 4096", "--vllm_max_num_seqs 3",
        "--vllm_enforce_eager true", "--vllm_enable_prefix_caching false", "--vllm_gpu_memory_utilization 0.3",
        "--sleep_level 2",
    ],
)  # fmt: skip
def test_flags_of_another_engine(given: str, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine that generates does not read is no setting of it."""
    words = f"{given} --global_batch_size 8 --reward_funcs accuracy"
    install(monkeypatch, vllm=True)
    check(dense, f"{words} --vllm_mode colocate")
    assert refusal(dense, f"{words} --use_vllm false") == (
        f"{given}: only for vLLM, and --use_vllm false is set. Remove it."
    )
    server = f"{words} --vllm_server_base_url http://a:1"
    if given == "--sleep_level 2":
        check(dense, server)
    else:
        assert refusal(dense, server) == (
            f"{given}: only for vLLM in the training processes, and a server generates. Set it for `swift rollout`, "
            "and remove it here."
        )
    line = ["rlhf", "--rlhf_type", "gkd", "--model", str(dense), "--dataset", "d", "--teacher_model", "t", "--lmbda"]
    options, sources, _ = read_options("megatron", [*line, "0", *given.split()])
    with pytest.raises(UsageError, match=f"{given} cannot be used with --lmbda 0: the student generates"):
        check_generation(options, sources)
    install(monkeypatch, vllm=False)
    assert f"{given}: only for vLLM, and it is not installed here" in refusal(dense, words)


def test_a_length_that_is_too_short(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm=True)
    words = "--global_batch_size 8 --max_length 100 --max_completion_length 60 --vllm_max_model_len"
    assert refusal(dense, f"{words} 159") == (
        "--vllm_max_model_len 159: less than the longest prompt (--max_length) and completion "
        "(--max_completion_length) together. Set 160 or more."
    )
    check(dense, f"{words} 160 --reward_funcs accuracy")


def test_keys_that_are_empty(dense: Path) -> None:
    """A variable that is not set."""
    message = r'--{} "": is empty\. Set the variable that it comes from'
    line = ["rollout", "--model", str(dense), "--api_key", ""]
    with pytest.raises(UsageError, match=message.format("api_key")):
        check_rollout(read_options("swift", line)[0])
    line = ["rlhf", "--model", str(dense), "--dataset", "d", "--rlhf_type"]
    options, sources, _ = read_options(
        "megatron", [*line, "grpo", "--vllm_mode", "server", "--vllm_server_api_key", ""]
    )
    with pytest.raises(UsageError, match=message.format("vllm_server_api_key")):
        check_generation(options, sources)
    server = ["--teacher_model_server", "http://a:1", "--teacher_model_server_api_key", ""]
    options, _, _ = read_options("megatron", [*line, "gkd", *server])
    with pytest.raises(UsageError, match=message.format("teacher_model_server_api_key")):
        check_teacher(options, 1)
    options, _, _ = read_options("megatron", [*line, "gkd", "--teacher_model_server", "http://a:port"])
    with pytest.raises(UsageError, match=r"^--teacher_model_server http://a:port: .*Use http://host:port\.$"):
        check_teacher(options, 1)


def test_weights_in_fp8_stay() -> None:
    options = compose(GrpoOptions, offload_model=True, fp8_param_gather=True)
    with pytest.raises(
        UsageError, match=r"--offload_model true cannot be used with --fp8_param_gather true, whose weights"
    ):
        _check_offload(options)


def test_nothing_leaves_where_the_student_generates_nothing() -> None:
    options = compose(GkdOptions, offload_optimizer=True, lmbda=0.0)
    with pytest.raises(UsageError, match=r"--offload_optimizer true cannot be used with --lmbda 0: the student"):
        _check_offload(options)


@pytest.mark.parametrize("asked", ["--vllm_mode colocate", "--use_vllm true"])
def test_vllm_that_is_not_installed(asked: str, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm=False)
    assert (
        f"{asked}: vLLM is not installed here. Run `pip install 'megaswift[vllm]'`, or set --use_vllm false, or "
        "--vllm_mode server with the address of a `swift rollout`."
    ) in refusal(dense, f"{asked} --global_batch_size 8")


@pytest.mark.parametrize(
    "words",
    [
        "--vllm_server_host a b --vllm_server_port 8000 8001",
        "--use_vllm true --vllm_server_base_url http://a:1",
        "--vllm_mode server --vllm_server_port 9000 --server_reconnect_timeout 10",
        "--vllm_server_host a --server_reconnect_timeout 7200 --vllm_server_timeout 7200 --ddp_timeout 7201",
        "--vllm_server_host a --ddp_timeout 200",
    ],
)
def test_a_server_needs_no_vllm_here(words: str, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm=False)
    check(dense, f"{words} --reward_funcs accuracy --global_batch_size 8")
