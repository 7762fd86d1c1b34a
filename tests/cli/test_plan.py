"""`megatron plan` as a user runs it."""

import json

import pytest
from megaswift.cli.main import main

from tests import tiny


@pytest.fixture
def folder(tmp_path):
    config = tiny.config("qwen3_moe").to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))  # no weights: they are not needed
    return tmp_path


def test_the_command_of_the_first_layout_is_one_that_training_takes(folder, capsys) -> None:
    assert main("megatron", ["plan", "--model", str(folder), "--gpus", "4", "--rows", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder}: 0.00 billion parameters")
    header = next(number for number, line in enumerate(lines) if line.startswith("layout"))
    assert all(f"  {name}" in lines[header] for name in ("AdamW on", "activations", "GiB", "tokens/s/GPU"))
    assert lines[header + 4] == ""  # three rows
    command = lines[-1].split()
    assert command[:3] == ["NPROC_PER_NODE=4", "megatron", "sft"]

    from megaswift.cli.main import read_options

    options, _, _ = read_options("megatron", command[2:])
    assert options.training.global_batch_size == 16
    assert options.data.packing


def test_activations_on_the_host(folder, capsys) -> None:
    """Each layer's input, and its attention's outputs, which are not computed again, are there."""
    layers = 2
    flags = f"--gpus 1 --max_length 65536 --global_batch_size 4 --cpu_offloading_num_layers {layers}"
    assert main("megatron", ["plan", "--model", str(folder), *flags.split(), "--micro_batch_size", "4"]) == 0
    command, note = capsys.readouterr().out.splitlines()[-2:]
    offload = f"--cpu_offloading true --cpu_offloading_num_layers {layers}"
    assert f"{offload} --recompute_method uniform --recompute_num_layers 1 --dataset" in command
    config = tiny.config("qwen3_moe")
    values = config.hidden_size + config.num_attention_heads * config.head_dim
    on_host = 2 * layers * 4 * 65_536 * values / 2**30
    assert on_host >= 0.1
    assert note == f"It keeps {on_host:.1f} GiB of each GPU in host memory."


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--gpus 1 --memory 2.1", 1, "error: --gpus 1: no layout fits. The least memory is"),
        ("--gpus 12", 2, "--gpus 12: not a multiple of --gpus_per_node 8"),
        ("--document_length 9000", 2, "--document_length 9000: longer than --max_length 4096"),
        ("--gpus 4 --global_batch_size 3 --micro_batch_size 2", 1, "no layout divides the batch"),
        ("--cpu_offloading_num_layers 99", 1, "--cpu_offloading_num_layers 99: the model has 4 layers"),
        ("--gpu h99", 2, "h99"),
        ("--lr 1", 2, "--lr"),
    ],
)
def test_bad_input(flags, code, message, folder, capsys) -> None:
    assert main("megatron", ["plan", "--model", str(folder), *flags.split()]) == code
    assert message in capsys.readouterr().err


def test_a_folder_without_a_config(tmp_path, capsys) -> None:
    assert main("megatron", ["plan", "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
