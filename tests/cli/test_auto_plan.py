"""`--plan auto` and `--micro_batch_size auto` on a machine with GPUs, of which nvidia-smi is a stand-in here."""

import json
import shlex
from pathlib import Path

import pytest
from megaswift.cli.auto_plan import plan_layout
from megaswift.cli.main import main, read_options
from megaswift.cli.training_launch import TrainingLaunch
from megaswift.tasks.plan import run_plan
from megaswift.tasks.run.args_json import save_args

from tests.cli.conftest import DENSE, write_model, write_tokenizer

# 1.6 billion parameters
CONFIG = DENSE | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16,
                  "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}  # fmt: skip

PP4 = "--pipeline_model_parallel_size 4"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that puts four GPUs of a name and MiB into the machine."""

    def install(name: str = "NVIDIA H100 80GB HBM3", memory: int = 81559) -> None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && exec printf "GPU 0\\nGPU 1\\nGPU 2\\nGPU 3\\n"\n'
                           f'[ "$1" = --id=0 ] && echo "{name}, {memory}"\n')  # fmt: skip
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows) -> list[str]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MODELSCOPE_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "model", CONFIG)
    write_tokenizer(folder)
    return (
        f"sft --model {folder} --dataset {rows} --max_length 4096 --packing true --train_iters 1 --plan auto "
        f"--output_dir {tmp_path}/out"
    ).split()


def dry(capsys, words: list[str], more: str = "") -> tuple[int, str]:
    code = main("megatron", [*words, *more.split(), "--dry_run", "true"])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def command_of(printed: str) -> list[str]:
    """Return the flags in the dry run's command."""
    line = next(line for line in printed.splitlines() if line.startswith("  command "))
    return shlex.split(line[line.index("megatron sft") :])[1:]


@pytest.mark.parametrize(
    ("more", "layout"),
    [("", "DP4, "), ("--pipeline_model_parallel_size 2", "PP2 VPP")],  # the model fits on each GPU
)
def test_the_layout_goes_into_the_command_and_is_not_planned_again(more, layout, gpus, words, capsys) -> None:
    gpus()
    code, printed = dry(capsys, words, more)
    assert code == 0, printed
    assert f"note: --plan auto: {layout}" in printed
    command = command_of(printed)
    options, sources, _ = read_options("megatron", command)
    assert options.training.plan == "auto"
    assert options.training.micro_batch_size * 4 <= 16
    assert f"micro_batch_size                            {options.training.micro_batch_size}   (--plan auto)" in printed
    assert "NPROC" not in printed
    launch = TrainingLaunch.of(options)
    assert plan_layout(options, sources, launch) == (options, [], [])


def test_flags_that_are_set_stay(gpus, words, capsys) -> None:
    gpus()
    offload = "--cpu_offloading true --cpu_offloading_num_layers 2"
    code, printed = dry(capsys, words, f"--tensor_model_parallel_size 4 --micro_batch_size 2 {offload}")
    assert code == 0, printed
    assert "note: --plan auto: TP4, " in printed
    options, _, _ = read_options("megatron", command_of(printed))
    assert (options.build.tensor_model_parallel_size, options.training.micro_batch_size) == (4, 2)
    assert options.build.sequence_parallel
    assert (options.build.cpu_offloading, options.build.cpu_offloading_num_layers) == (True, 2)


@pytest.mark.parametrize(("host", "is_offloaded"), [(10**12, "true"), (10**9, "false")])
def test_activations_of_long_documents(host, is_offloaded, gpus, words, capsys, monkeypatch) -> None:
    gpus()
    monkeypatch.setattr(run_plan, "host_memory_share", lambda processes: host / processes)
    long = "--max_length 131072 --recompute_granularity full --context_parallel_size 1 --tensor_model_parallel_size 1"
    code, printed = dry(capsys, words, long)
    assert code == 0, printed
    assert f"--cpu_offloading={is_offloaded}" in command_of(printed)


def test_less_memory_needs_another_layout(gpus, words, capsys) -> None:
    gpus(memory=24_000)
    code, printed = dry(capsys, words)
    assert code == 0, printed
    memory = next(line.split() for line in printed.splitlines() if line.startswith("  memory "))
    assert float(memory[1]) < 24_000 / 1024
    gpus(memory=4_000)
    assert "error: --plan auto: no layout fits on 4 GPUs of 3.9 GiB. The least memory is" in dry(capsys, words)[1]


def test_a_resumed_run_has_the_layout_of_its_checkpoint(gpus, words, capsys, tmp_path) -> None:
    gpus()
    checkpoint = tmp_path / "out" / "v0-20260101-000000" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    options, _, _ = read_options("megatron", [*words, "--tensor_model_parallel_size", "2"])
    save_args(checkpoint / "args.json", options, {})
    (checkpoint / "trainer_state").mkdir()
    resumes = "--resume_from_checkpoint auto"
    assert "note: --plan auto: TP2 DP2, as in the checkpoint, " in dry(capsys, words, resumes)[1]
    assert "note: --plan auto: DP4, " in dry(capsys, words)[1]
    # Files of earlier versions have no flags of activations on the host.
    file = checkpoint / "args.json"
    saved = json.loads(file.read_text())
    del saved["options"]["cpu_offloading"], saved["options"]["cpu_offloading_num_layers"]
    file.write_text(json.dumps(saved))
    assert "note: --plan auto: TP2 DP2, as in the checkpoint, " in dry(capsys, words, resumes)[1]
    # A layout that the machine does not have is planned anew.
    saved = json.loads((checkpoint / "args.json").read_text())
    saved["options"]["tensor_model_parallel_size"]["value"] = 8
    (checkpoint / "args.json").write_text(json.dumps(saved))
    assert "note: --plan auto: DP4, " in dry(capsys, words, resumes)[1]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ("--optimizer sgd", "--plan auto: not planned: --optimizer sgd. Set the layout's flags instead"),
        ("--freeze_parameters_ratio 0.5", "--plan auto: not planned: --freeze_parameters_ratio."),
        ("--sequence_parallel false", "--plan auto cannot be used with --sequence_parallel false"),
        ("--use_ray true", "--plan auto cannot be used with --use_ray true"),
        (
            "--global_batch_size 3 --micro_batch_size 2",
            "with --micro_batch_size 2 divides --global_batch_size 3",
        ),
        ("--tensor_model_parallel_size 3", "of 78.9 GiB with --tensor_model_parallel_size 3 divides"),
    ],
)
def test_refusals(more, error, gpus, words, capsys) -> None:
    gpus()
    code, printed = dry(capsys, words, more)
    assert (code, error in printed) == (2, True), printed


def test_gpus_that_are_not_known(gpus, words, capsys) -> None:
    code, printed = dry(capsys, words)
    assert (code, "error: --plan auto: no GPU is visible." in printed) == (2, True), printed
    gpus("NVIDIA GeForce GTX 1080", 8192)
    assert "--plan auto: the speed of NVIDIA GeForce GTX 1080 is not known." in dry(capsys, words)[1]


def test_a_dry_run_refuses_what_the_run_would(gpus, words, capsys) -> None:
    gpus(memory=9_000)
    layout = [word for word in words if word not in ("--plan", "auto")]
    code, printed = dry(capsys, layout)
    assert (code, "needs at least" in printed) == (1, True), printed
    assert dry(capsys, layout, "--plan off")[0] == 0


def micro_batch(capsys, words: list[str], more: str = "") -> tuple[int, str]:
    """Return the micro batch in the command that starts the processes, and what the dry run printed."""
    code, printed = dry(capsys, [*unplanned(words), "--micro_batch_size", "auto"], more)
    assert code == 0, printed
    options, _, _ = read_options("megatron", command_of(printed))
    size = options.training.micro_batch_size
    assert f"micro_batch_size                            {size}   (--micro_batch_size auto)" in printed
    return size, printed


def unplanned(words: list[str]) -> list[str]:
    return [word for word in words if word not in ("--plan", "auto")]


def planned_memory(printed: str) -> float:
    return float(next(line.split()[1] for line in printed.splitlines() if line.startswith("  memory ")))


def test_the_largest_micro_batch_that_fits(gpus, words, capsys) -> None:
    gpus("NVIDIA H200", 143_771)
    assert micro_batch(capsys, words)[0] == 4  # 16 samples on 4 GPUs
    batch = "--global_batch_size 64"
    assert micro_batch(capsys, words, batch)[0] == 8  # packs of 4,096 tokens: more than 32,768 would not be faster
    gpus()
    size, printed = micro_batch(capsys, words, batch)
    assert f"note: --micro_batch_size auto: {size}, for " in printed
    limit = 0.95 * (81_559 / 1024 - 2)
    assert (size, planned_memory(printed) < limit) == (4, True)
    code, printed = dry(capsys, unplanned(words), f"{batch} --plan off --micro_batch_size 8")
    assert (code, planned_memory(printed) > limit) == (0, True)
    recomputed = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
    assert micro_batch(capsys, words, f"{batch} {recomputed}")[0] == 8
    assert micro_batch(capsys, words, "--pipeline_model_parallel_size 4")[0] == 1  # more would idle stages
    assert micro_batch(capsys, words, "--global_batch_size 12")[0] == 1  # 3 of each GPU


def test_the_micro_batch_of_a_plan(gpus, words, capsys) -> None:
    """--plan auto searches it too."""
    gpus()
    code, printed = dry(capsys, words, "--micro_batch_size auto")
    assert code == 0, printed
    options, _, _ = read_options("megatron", command_of(printed))
    assert options.training.micro_batch_size in (1, 2, 4)
    assert "note: --plan auto: DP4, " in printed
    assert " (--plan auto)" in printed


def test_a_resumed_run_has_the_micro_batch_of_its_checkpoint(gpus, words, capsys, tmp_path) -> None:
    gpus()
    checkpoint = tmp_path / "out" / "v0-20260101-000000" / "checkpoint-1"
    (checkpoint / "trainer_state").mkdir(parents=True)
    options, _, _ = read_options("megatron", [*words, "--micro_batch_size", "2"])
    save_args(checkpoint / "args.json", options, {})
    size, printed = micro_batch(capsys, words, "--resume_from_checkpoint latest")
    assert (size, ": 2, as in the checkpoint, for " in printed) == (2, True)
    size, printed = micro_batch(capsys, words, "--resume_from_checkpoint latest --global_batch_size 12")
    assert (size, "as in the checkpoint" in printed) == (1, False)  # 2 does not divide it


def test_a_micro_batch_with_activations_on_the_host(gpus, words, capsys) -> None:
    gpus()
    assert micro_batch(capsys, words, "--cpu_offloading true --cpu_offloading_num_layers 2")[0] == 4


def test_a_micro_batch_without_a_gpu(words, capsys) -> None:
    assert micro_batch(capsys, words)[0] == 4
    assert micro_batch(capsys, words, "--global_batch_size 6")[0] == 2
    assert micro_batch(capsys, words, "--global_batch_size 5")[0] == 1
    words = ["rlhf", "--rlhf_type", "gkd", "--teacher_model", words[2], *unplanned(words)[1:]]
    code, printed = dry(capsys, words, "--micro_batch_size auto --packing false")
    assert (code, "--micro_batch_size auto: 4, without a GPU" in printed) == (0, True), printed


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ("", 2),
        ("--max_length 16384", 1),  # about as fast as more, with less memory
        ("--max_length 40960 --recompute_granularity full --recompute_method uniform --recompute_num_layers 1", 1),
        ("--padding_free false --packing false", 1),
        ("--micro_batch_size 1", 1),
        ("--packing false --max_length 1024", 4),
        ("--global_batch_size 12", 1),
        ("--plan off", 1),
        ("--optimizer sgd", 1),
        ("--use_ray true", 1),
        (PP4, 1),
    ],
)
def test_default_micro_batches(more, size, gpus, words, capsys) -> None:
    gpus()
    code, printed = dry(capsys, unplanned(words), more)
    options, _, _ = read_options("megatron", command_of(printed))
    assert (code, options.training.micro_batch_size) == (0, size), printed
    padded = "--padding_free false --packing false"
    unplanned_flags = "--micro_batch_size 1", "--plan off", "--optimizer sgd", "--use_ray true", padded
    assert ("by default, for" in printed) == (more not in unplanned_flags)


def test_a_resumed_run_keeps_its_micro_batch_by_default(gpus, words, capsys, tmp_path) -> None:
    gpus()
    checkpoint = tmp_path / "out" / "v0-20260101-000000" / "checkpoint-1"
    (checkpoint / "trainer_state").mkdir(parents=True)
    options, _, _ = read_options("megatron", unplanned(words))
    save_args(checkpoint / "args.json", options, {})
    printed = dry(capsys, unplanned(words), "--resume_from_checkpoint latest")[1]
    assert "--micro_batch_size: 1 by default, as in the checkpoint, for" in printed


def test_a_default_micro_batch_needs_a_measured_plan(gpus, words, capsys, monkeypatch) -> None:
    gpus()
    monkeypatch.setattr(run_plan, "MEASURED_MODELS", ())
    code, printed = dry(capsys, unplanned(words))
    assert (code, "--micro_batch_size=" in printed) == (0, False), printed


@pytest.mark.parametrize(
    "variables",
    [
        {"NNODES": "2", "MASTER_ADDR": "127.0.0.1"},
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},  # of the user's torchrun
    ],
)
def test_runs_that_plan_by_themselves_have_no_default_micro_batch(variables, gpus, words, capsys, monkeypatch) -> None:
    gpus()
    for name, value in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | variables).items():
        monkeypatch.setenv(name, value)
    code, printed = dry(capsys, unplanned(words))
    assert (code, "by default, for" in printed) == (0, False), printed


def test_errors_of_models_are_those_of_the_checks(gpus, words, capsys) -> None:
    gpus()
    _, *rest = unplanned(words)
    code, printed = dry(capsys, ["sft", *rest[2:]])
    assert (code, printed) == dry(capsys, ["sft", *rest[2:], "--micro_batch_size", "1"])
    code, printed = dry(capsys, unplanned(words), "--mcore_model nowhere")
    assert (code, printed) == dry(capsys, unplanned(words), "--mcore_model nowhere --micro_batch_size 1")


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ("--optimizer sgd", "--micro_batch_size auto: not planned: --optimizer sgd. Set a number"),
        ("--tensor_model_parallel_size 2", "is planned with --sequence_parallel true. Set that too"),
        ("--use_ray true", "--micro_batch_size auto cannot be used with --use_ray true"),
        ("--task_type embedding --packing false", "not planned: --task_type embedding without --packing true."),
        ("--global_batch_size 6", "no micro batch divides --global_batch_size 6"),
    ],
)
def test_refused_micro_batches(more, error, gpus, words, capsys) -> None:
    gpus()
    words = [*unplanned(words), "--micro_batch_size", "auto"]
    code, printed = dry(capsys, words, more)
    assert (code, error in printed) == (2, True), printed


def test_gpus_without_a_micro_batch(gpus, words, capsys) -> None:
    words = [*unplanned(words), "--micro_batch_size", "auto"]
    gpus(memory=4_000)
    assert "none fits: the smallest needs" in dry(capsys, words)[1]
    gpus("NVIDIA GeForce GTX 1080", 8192)
    assert "the speed of NVIDIA GeForce GTX 1080 is not known" in dry(capsys, words)[1]
