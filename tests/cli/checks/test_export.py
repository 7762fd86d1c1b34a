"""Checks of `swift export` and `megatron export`, and the guide's commands."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from megaswift.cli import main as cli
from megaswift.cli.checks import export
from megaswift.cli.checks.export import gpus_needed
from megaswift.cli.main import main, read_options, swift

from tests.cli.conftest import DENSE, MIXTURE, write_model

GUIDE = """
swift export \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --use_hf \\
    --to_mcore true \\
    --torch_dtype bfloat16 \\
    --output_dir Qwen2.5-7B-Instruct-mcore \\
    --test_convert_precision true

swift export \\
    --mcore_model megatron_output/model/vx-xxx/checkpoint-xxx \\
    --to_hf true \\
    --torch_dtype bfloat16 \\
    --output_dir megatron_output/model/vx-xxx/checkpoint-xxx-hf \\
    --test_convert_precision true
"""


def mcore(folder: Path, config: dict | None = DENSE) -> Path:
    """Make a folder that looks like a megatron-core checkpoint, without tensors."""
    inside = folder / "iter_0000007"
    inside.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")
    (inside / ".metadata").write_bytes(b"")
    (inside / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return the options of the run after the checks."""
    ran: list = []
    monkeypatch.setattr(cli, "_run", lambda command, options, sources: ran.append(options) or 0)
    return ran


def message(capsys, program: str, *words: str | Path) -> str:
    assert main(program, ["export", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_the_guides_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_runs: list) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", DENSE)
    mcore(tmp_path / "megatron_output/model/vx-xxx/checkpoint-xxx")
    for command in GUIDE.strip().split("\n\n"):
        program, *words = shlex.split(command.replace("\\\n", " ").replace("Qwen/Qwen2.5-7B-Instruct ", "model "))
        assert main(program, words) == 0
    there, back = nothing_runs
    assert (there.to_mcore, there.torch_dtype, there.test_convert_precision) == (True, "bfloat16", True)
    assert (back.to_hf, back.output_dir) == (True, "megatron_output/model/vx-xxx/checkpoint-xxx-hf")


def test_to_where(dense: Path, tmp_path: Path, capsys) -> None:
    assert "error: --to_mcore, --to_hf: missing. Set one of them to true, for" in message(
        capsys, "swift", "--model", dense
    )
    both = ("--to_mcore", "true", "--to_hf", "true")
    assert "--to_mcore true cannot be used with --to_hf true. Remove one of them." in message(capsys, "swift", *both)
    assert "--to_hf true needs --mcore_model" in message(capsys, "swift", "--to_hf", "--model", dense)
    assert "error: --model: missing. Set" in message(capsys, "swift", "--to_mcore")
    there = mcore(tmp_path / "there")
    said = message(capsys, "swift", "--to_mcore", "--mcore_model", there)
    assert f"--mcore_model {there}: is in megatron-core's format already" in said
    other = write_model(tmp_path / "other", MIXTURE)
    said = message(capsys, "swift", "--to_hf", "--mcore_model", there, "--model", other)
    assert f"--model {other}: its model_type is qwen3_moe, that of {there} qwen3, and config.json and tokenizer" in said


def test_what_is_no_mcore_folder(dense: Path, tmp_path: Path, capsys) -> None:
    def said(folder: Path) -> str:
        return message(capsys, "swift", "--to_hf", "--mcore_model", folder)

    assert f"--mcore_model {tmp_path / 'none'}: no such folder" in said(tmp_path / "none")
    assert f"--mcore_model {dense}: no megatron-core distributed checkpoint there" in said(dense)
    (dense / "model.safetensors").touch()
    assert "no megatron-core distributed checkpoint there. It is a" in said(dense)
    run = tmp_path / "run"
    found = mcore(run / "checkpoint-7") / "iter_0000007"
    assert f"Is it {found.parent} that you mean?" in said(run)
    assert f"no config.json there. Copy it and the tokenizer's files from the model's Hugging Face checkpoint into it. Is it {found.parent} that you mean?" in said(found)  # fmt: skip  # noqa: E501
    assert "no config.json there" in said(mcore(tmp_path / "bare", None))
    (found.parent / "latest_checkpointed_iteration.txt").write_text("8")
    assert "names 8, but iter_0000008 is missing beside it" in said(found.parent)
    (found.parent / "latest_checkpointed_iteration.txt").write_text("x")
    assert "has 'x' instead of an iteration's number or release" in said(found.parent)
    old = tmp_path / "old"
    (old / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    (old / "latest_checkpointed_iteration.txt").write_text("1")
    assert "It is in Megatron-LM's older format. Save it with Megatron-LM's --ckpt-format torch_dist" in said(old)
    cut = mcore(tmp_path / "cut")
    (cut / "latest_checkpointed_iteration.txt").unlink()
    assert "iter_0000007 is one, but no latest_checkpointed_iteration.txt names it" in said(cut)
    (cut / "latest_checkpointed_iteration.txt").write_text("7")
    (cut / "iter_0000007" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "metadata.json has the format 'zarr'. Save it with Megatron-LM's" in said(cut)
    (cut / "iter_0000007" / "metadata.json").write_text("{")
    assert "metadata.json has no checkpoint format" in said(cut)
    (cut / "iter_0000007" / "metadata.json").unlink()
    (cut / "iter_0000007" / "__0_0.distcp").touch()
    assert "iter_0000007 has *.distcp files, and no metadata.json. Copy the folder again" in said(cut)
    unknown = mcore(tmp_path / "unknown", DENSE | {"architectures": ["OtherForCausalLM"]})
    assert f"--mcore_model {unknown}: config.json names the architecture OtherForCausalLM" in said(unknown)
    assert f"--mcore_model {unknown}: config.json names" in message(capsys, "swift", "--to_hf", "--load", unknown)


def test_an_unknown_family(tmp_path: Path, capsys) -> None:
    model = write_model(tmp_path / "model", DENSE | {"architectures": ["OtherForCausalLM"]})
    assert "the architecture OtherForCausalLM, which this version does not support" in message(
        capsys, "swift", "--to_mcore", "--model", model
    )


def test_the_output_folder(dense: Path, tmp_path: Path, capsys, nothing_runs: list) -> None:
    def said(*words: str | Path) -> str:
        return message(capsys, "swift", "--to_mcore", "--model", dense, "--output_dir", *words)

    for folder in (dense, dense / "mcore", tmp_path):
        assert f"--output_dir {folder}: it is, contains or lies within the folder to export" in said(folder)
    there = tmp_path / "there"
    there.mkdir()
    assert main("swift", ["export", "--to_mcore", "--model", str(dense), "--output_dir", str(there)]) == 0
    (there / "notes.txt").touch()
    assert f"--output_dir {there}: it exists. Set another one, or --exist_ok true to replace it." in said(there)
    assert "replaces only folders of earlier exports, and this one is none (it has no manifest.json)" in said(
        there, "--exist_ok"
    )
    manifest = there / "manifest.json"
    manifest.touch()
    assert "manifest.json is not a manifest" in said(there, "--exist_ok")
    manifest.write_text('{"files": {"args.json": {"size": 0, "sha256": ""}}}')
    for options in ('{"save_steps": {}}', '{"to_mcore": {}}'):  # a run's checkpoint, then an export
        assert "this one is none (its args.json is no export's)" in said(there, "--exist_ok")
        (there / "args.json").write_text(f'{{"options": {options}}}')
    assert "this one is none (notes.txt are not in its manifest)" in said(there, "--exist_ok")
    (there / "notes.txt").unlink()
    assert main("swift", ["export", "--to_mcore", "--model", str(dense), "--output_dir", str(there), "--exist_ok"]) == 0
    link = tmp_path / "link"
    link.symlink_to(there)
    assert f"--output_dir {there}: it exists" in said(link)
    assert f"--output_dir {tmp_path / ('x' * 300)}: File name too long. Set another one." in said(
        tmp_path / ("x" * 300)
    )
    assert "error: --output_dir /proc: it is a mount point. Set a folder within" in said("/proc")
    assert f"--output_dir {dense / 'config.json'}: it is, contains" in said(dense / "config.json")
    (tmp_path / "file").touch()
    assert f"--output_dir {tmp_path / 'file'}: it is a file" in said(tmp_path / "file")
    assert "--max_shard_size" in message(
        capsys, "swift", "--to_hf", "--mcore_model", mcore(tmp_path / "mcore"), "--max_shard_size", "many"
    )
    (tmp_path / "dense-mcore").mkdir()
    (tmp_path / "dense-mcore" / "file").touch()  # the default
    assert f"--output_dir {dense}-mcore: it exists" in message(capsys, "swift", "--to_mcore", "--model", dense)


def test_layouts(dense: Path, mixture: Path, capsys, monkeypatch: pytest.MonkeyPatch, nothing_runs: list) -> None:
    def said(model: Path, *words: str) -> str:
        return message(capsys, "megatron", "--to_mcore", "--model", model, *words)

    tensor, expert = "--tensor_model_parallel_size", "--expert_model_parallel_size"
    assert f"{tensor} 3: does not divide the model's 8 attention heads" in said(dense, tensor, "3")
    assert f"{expert} 2: the model has no experts" in said(dense, expert, "2")
    assert "= 2: does not divide the number of processes, 1" in said(dense, tensor, "2")
    assert f"{tensor} 0: must be above 0" in said(dense, tensor, "0")
    assert "error: --pipeline_model_parallel_size 3: 4 of the model's 4 layers cannot be split" in said(
        dense, "--pipeline_model_parallel_size", "3"
    )
    said_of_training = "--context_parallel_size: a flag of `megatron sft`, not of this command"
    assert said_of_training in said(dense, "--context_parallel_size", "2")
    assert f"{tensor}: a flag of `megatron" in message(capsys, "swift", "--to_mcore", "--model", dense, tensor, "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    words = ["export", "--to_mcore", "--model", str(mixture), tensor, "2", expert, "2"]
    assert main("megatron", words) == 0  # experts under TP: sequence parallelism is for training alone
    assert nothing_runs[0].expert_model_parallel_size == 2


def test_a_model_too_large_for_one_gpu_passes_through_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", MIXTURE | {"num_hidden_layers": 46, "dtype": "float32"})
    with (model / "model.safetensors").open("wb") as stream:
        stream.truncate(100 * 2**30)  # sparse
    options, *_ = read_options("swift", ["export", "--model", str(model), "--to_mcore"])
    monkeypatch.setattr(export, "_gpu_bytes", lambda: 80 * 2**30)
    config = MIXTURE | {"num_hidden_layers": 46, "dtype": "float32"}
    assert gpus_needed(options, config, gpus=1) == (1, [], "")
    stages, flags, why = gpus_needed(options, config, gpus=8)
    assert (stages, flags) == (2, ["--pipeline_model_parallel_size", "2"])
    assert why == "the weights take 100 GiB, a GPU has 80 GiB: 2 GPUs share the layers."
    monkeypatch.setattr(export, "_gpu_bytes", lambda: 30 * 2**30)
    _, flags, _ = gpus_needed(options, config, gpus=8)  # by four, one would have 12 of the 46 layers
    assert flags == ["--pipeline_model_parallel_size", "5", "--decoder_first_pipeline_num_layers", "6"]
    hybrid = {name: value for name, value in config.items() if name != "num_hidden_layers"}
    hybrid["layers_block_type"] = ["moe"] * 46  # what transformers writes for Nemotron-H
    assert gpus_needed(options, hybrid, gpus=8)[1] == flags
    options.torch_dtype = "bfloat16"
    assert gpus_needed(options, config, gpus=8)[1] == ["--pipeline_model_parallel_size", "2"]
    monkeypatch.setattr(export, "_gpu_bytes", lambda: 3 * 2**30)
    with pytest.raises(export.UsageError, match=r"8 visible GPUs have 3 GiB each\. Set CUDA_VISIBLE_DEVICES="):
        gpus_needed(options, config, gpus=8)


def test_training_from_mcore(dense: Path, mixture: Path, tmp_path: Path, rows: Path, capsys) -> None:
    def said(*words: str | Path) -> str:
        line = ["sft", "--dataset", str(rows), "--train_iters", "1", *map(str, words)]
        assert main("megatron", line) == 2
        return capsys.readouterr().err

    there = mcore(tmp_path / "there")
    assert "come from the folder of --mcore_model. Remove one of them" in said(
        "--mcore_model", there, "--model", mixture
    )
    assert f"--mcore_model {dense}: no megatron-core distributed checkpoint" in said("--mcore_model", dense)
    assert "must be above 0" in said("--mcore_model", there, "--save_safetensors", "false", "--micro_batch_size", "0")


@pytest.mark.parametrize(
    ("words", "feature"),
    [
        ("--quant_bits 4", "a choice of bits"),
        ("--quant_n_samples 256", "quantization that needs data (AWQ, GPTQ). Set --quant_method fp8"),
        ("--to_peft_format true", "exports other than to_mcore and to_hf"),
    ],
)
def test_later_features_are_refused_by_name(words: str, feature: str, dense: Path, capsys) -> None:
    assert f"no support for {feature}" in message(capsys, "swift", "--to_mcore", "--model", dense, *words.split())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "model/config.json"), "Permission denied: 'model/config.json'"),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
            "error: another rank exited. See its",
        ),
    ],
)
def test_errors_that_are_not_ours_and_say_enough(
    error: Exception, said: str, dense: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", failing)
    assert main("swift", ["export", "--to_mcore", "--model", str(dense)]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("command", "at_once"), [("export", True), ("infer", False)])
def test_an_export_ends_without_waiting_for_its_threads(
    command: str, at_once: bool, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    monkeypatch.setattr(sys, "argv", ["swift", command, "--no_such_flag"])
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(SystemExit):
        swift()
    assert ended == [2] * at_once
    assert "--no_such_flag" in capsys.readouterr().err
