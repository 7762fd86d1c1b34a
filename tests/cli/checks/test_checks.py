"""Unusable options are refused before heavy imports, with flag, value and fix."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megaswift.bridge.option_groups import compose, with_flags
from megaswift.cli.checks.common import check_infer, check_lock, check_training
from megaswift.cli.checks.resume import check_resume
from megaswift.cli.flags import UsageError
from megaswift.cli.main import main, read_options
from megaswift.tasks.options import InferOptions, SftOptions
from megaswift.tasks.run import run_dir
from megaswift.tasks.run.args_json import save_args
from megaswift.tasks.run.planning import ProcessLayout

from tests.cli.conftest import DENSE, write_model


def check(model: Path, words: str, *, world: int = 1, gpus: int = 0) -> tuple[Any, list[str]]:
    line = ["sft", "--model", str(model), "--dataset", "d", "--train_iters", "1", *words.split()]
    options, sources, _ = read_options("megatron", line)
    notes = check_training(options, ProcessLayout.of(options.build, world), gpus=gpus, processes=world, sources=sources)
    return options, notes


TP, PP, CP, EP, ETP, VPP = (
    f"--{name}_parallel_size"
    for name in (
        "tensor_model",
        "pipeline_model",
        "context",
        "expert_model",
        "expert_tensor",
        "virtual_pipeline_model",
    )
)
FIRST, LAST = "--decoder_first_pipeline_num_layers", "--decoder_last_pipeline_num_layers"
SP = "--sequence_parallel true"


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (f"{TP} 3", 3, f"{TP} 3: does not divide the model's 8 attention heads. Set a divisor of 8."),
        (f"{TP} 0", 1, f"{TP} 0: must be above 0."),
        (f"{TP} 2", 3, "= 2: does not divide the number of processes, 3. Set NPROC_PER_NODE"),
        (f"{TP} 4 {PP} 2", 4, f"{TP} x {PP} x {CP} = 8: does not divide the number of processes, 4."),
        (f"{PP} 3", 3, f"{PP} 3: 4 of the model's 4 layers cannot be split evenly over 3 stages"),
        (f"{PP} 8 --global_batch_size 8", 8, "--pipeline_model_parallel_size 8: 4 of"),
        (f"{PP} 2 {VPP} 3", 2, f"{PP} 2, {VPP} 3: 4 of the model's 4 layers"),
        (f"{PP} 3 {FIRST} 1", 3, f"{PP} 3, {FIRST} 1: 3 of the model's 4 layers cannot be split evenly over 2 stages"),
        (f"{PP} 2 {FIRST} 2 {LAST} 1", 2, f"{FIRST} 2, {LAST} 1: 1 of the model's 4 layers cannot"),
        (f"{PP} 2 {FIRST} 3 {VPP} 2", 2, f"{FIRST} 3: not a multiple of {VPP} 2."),
        (f"{VPP} 2", 1, f"{VPP} 2: there is one pipeline stage. Set {PP} 2 or more"),
        (f"{FIRST} 2", 1, f"{FIRST} 2: there is one pipeline stage."),
        (f"{PP} 2 {VPP} 2 --global_batch_size 1", 2, f"{VPP} 2: 1 micro batch per data-parallel process and step"),
        (
            f"{PP} 2 {VPP} 2 --microbatch_group_size_per_vp_stage 3 --global_batch_size 4",
            2,
            "--microbatch_group_size_per_vp_stage 3: 4 micro batches per",
        ),
        (f"{EP} 2", 2, f"{EP} 2: the model has no experts. Remove it."),
        ("--lr_warmup_iters 9 --train_iters 8", 1, "--lr_warmup_iters 9: not below the 8 steps of the schedule. Set a"),
        ("--lr_warmup_iters 8 --train_iters 8", 1, "--lr_warmup_iters 8: not below the 8 steps of the schedule. Set a"),
        (
            "--lr_wsd_decay_iters 6 --lr_warmup_iters 3 --train_iters 8",
            1,
            "--lr_wsd_decay_iters 6 and --lr_warmup_iters 3: more than the 8 steps of the schedule.",
        ),
        ("--lr_wsd_decay_iters 9 --train_iters 8", 1, "--lr_wsd_decay_iters 9: more than the 8 steps of the schedule."),
        ("--train_iters 0", 1, "--train_iters 0: must be above 0."),
        ("--max_shard_size 1.2.3GB", 1, "--max_shard_size 1.2.3GB: not a size. Set one such as 5GB or 500MB"),
        ("--global_batch_size 3", 2, "--global_batch_size 3: not a multiple of --micro_batch_size 1 x 2 data-parallel"),
        ("--global_batch_size 5 --micro_batch_size 2", 1, "--global_batch_size 5: not a"),
        (f"{CP} 2 --max_length 1023", 2, f"--max_length 1023: not a multiple of 2 x {CP} 2 = 4. Set 1024."),
        (f"{TP} 2 {SP} --packing true --max_length 101", 2, "--max_length 101: not a multiple of"),
        ("--packing true", 1, "--packing true needs the length of a pack. Set --max_length."),
        ("--recompute_granularity full", 1, "--recompute_granularity full needs --recompute_method"),
        (
            "--recompute_granularity full --recompute_method block",
            1,
            "--recompute_granularity full needs --recompute_num_layers. Set it,",
        ),
        ("--lr_warmup_iters 2 --lr_warmup_fraction 0.1", 1, "--lr_warmup_iters cannot be used with"),
        ("--lr_warmup_fraction 1.5", 1, "--lr_warmup_fraction 1.5: must be at least 0 and below 1."),
        ("--system nope.txt", 1, "--system nope.txt: no such file (in"),
        ("--val_dataset /dev/null", 1, "--val_dataset /dev/null: is a pipe or a device"),
        ("--columns " + "[" * 100_000, 1, "JSON that is nested too deeply."),
        ("--lr 1e-5 --min_lr 1e-4", 1, "--min_lr 0.0001: above --lr 1e-05."),
        (
            "--overlap_param_gather true --overlap_grad_reduce false",
            1,
            "--overlap_param_gather true cannot be used with",
        ),
        ("--profile true --train_iters 5", 1, "--profile_step_start 10: the run has 5 steps. Set an earlier one."),
        ("--profile true --profile_step_end 9", 1, "--profile_step_start 10, --profile_step_end 9: no such range. Set"),
        ("--profile true --train_iters 20 --profile_ranks 1", 1, "--profile_ranks 1: the run has 1 process. Set 0 to"),
        ("--max_shard_size big", 1, "--max_shard_size big: not a size. Set one such as 5GB or 500MB"),
        ("--save_strategy epoch --streaming true", 1, "--save_strategy epoch cannot be used with --streaming true."),
    ],
)
def test_options_that_cannot_be_together(dense: Path, words: str, world: int, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check(dense, words, world=world)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (f"{TP} 2", 2, f"{TP} 2: an MoE model with it needs sequence parallelism. Set --sequence_parallel true."),
        (f"{EP} 3", 3, f"{EP} 3: does not divide the model's 8 experts. Set a divisor of 8."),
        (f"{EP} 2 {ETP} 2", 2, f"{EP} x {ETP} x {PP} = 4: does not divide the number of processes, 2."),
        (f"{ETP} 9 --global_batch_size 18", 9, f"{ETP} 9: does not divide the model's 24 columns of an expert."),
    ],
)
def test_experts_that_cannot_be_shared(mixture: Path, words: str, world: int, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check(mixture, words, world=world)
    assert message in str(error.value)


def test_groups_of_mamba_layers_that_are_not_divided(tmp_path: Path) -> None:
    config = DENSE | {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    config |= {"mamba_num_heads": 8, "n_groups": 4, "hybrid_override_pattern": "M-*-"}
    with pytest.raises(UsageError, match=f"{TP} 4 x {CP} 2: does not divide the 4 groups of the model's Mamba-2 layer"):
        check(write_model(tmp_path / "mamba", config), f"{TP} 4 {CP} 2 {SP} --max_length 1024", world=8)
    config = DENSE | {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_d_ssm": 64}
    config |= {"mamba_n_heads": 4, "mamba_n_groups": 1}
    with pytest.raises(UsageError, match=f"{TP} 4 x {CP} 2: does not divide the 4 parts of the groups of the model's"):
        check(write_model(tmp_path / "one group", config), f"{TP} 4 {CP} 2 {SP} --max_length 1024", world=8)


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (
            f"{TP} 4 {CP} 2 {SP} --max_length 1024",
            8,
            f"{TP} 4 x {CP} 2: does not divide the 4 key heads of the model's gated delta nets. Set a product that "
            "divides 4.",
        ),
        (f"{EP} 2 --global_batch_size 2", 2, f"{EP} 2: the model has no experts. Remove it."),
    ],
)
def test_sizes_of_a_text_model_within_another(tmp_path: Path, words: str, world: int, message: str) -> None:
    text = DENSE | {"model_type": "qwen3_5_text", "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    seeing = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    with pytest.raises(UsageError) as error:
        check(write_model(tmp_path / "seeing", seeing), words, world=world)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "world"),
    [
        (f"{TP} 2 {SP}", 2),
        (f"{TP} 8", 8),  # more than the 4 KV heads
        (f"{TP} 4 {PP} 2 {CP} 2 {SP} --max_length 1024 --packing true", 32),
        (f"{PP} 2 {FIRST} 3", 2),
        (f"{PP} 3 {FIRST} 1 {LAST} 2", 3),
        (f"{PP} 2 {VPP} 2", 2),
        (f"{PP} 2 {VPP} 1 --global_batch_size 1", 2),
    ],
)
def test_layouts_that_can_run(dense: Path, words: str, world: int) -> None:
    assert check(dense, words, world=world)[1] == []


def test_epochs_beside_steps_are_left_out(dense: Path) -> None:
    options, notes = check(dense, "--num_train_epochs 0.5 --lr_warmup_fraction 0.05")
    assert options.training.num_train_epochs is None
    assert notes == ["--num_train_epochs 0.5 is ignored: --train_iters 1 is set."]


@pytest.mark.parametrize("value", ["yarn", '{"type":"yarn","factor":4.0}'])
def test_rope_scaling(value: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", DENSE | {"max_position_embeddings": 32})
    words = f"--rope_scaling {value} --max_position_embeddings 128 --max_length 100"
    options, notes = check(model, words)
    assert notes == ["--rope_scaling: yarn by 4, for 128 positions; saved in config.json."]
    saved = tmp_path / "args.json"
    save_args(saved, options, {})
    again, _, _ = read_options("megatron", ["sft", "--config", str(saved)])
    assert again.rope_scaling == options.rope_scaling
    assert "not in adapters" in check(model, f"{words} --tuner_type lora --merge_lora false")[1][0]
    with pytest.raises(UsageError, match="no support for type dynamic, whose"):
        check(model, "--rope_scaling dynamic --max_model_len 128")
    with pytest.raises(UsageError, match=r"no support for type longer\. Set one of yarn, linear, llama3, default"):
        check(model, "--rope_scaling longer --max_model_len 128")


def test_packing_has_no_padding(dense: Path) -> None:
    options, notes = check(dense, "--packing true --padding_free false --max_length 8")
    assert options.data.padding_free
    assert notes == ["--padding_free false is ignored: --packing true is set, and padding changes no number."]
    assert not check(dense, "--padding_free false")[0].data.padding_free


def test_sequence_parallelism_without_tensor_parallelism_is_switched_off(mixture: Path) -> None:
    options, notes = check(mixture, f"{SP} {EP} 2", world=2)
    assert options.build.sequence_parallel is False
    (note,) = notes
    assert note.startswith("--sequence_parallel true is disabled")


def test_more_processes_than_gpus(dense: Path) -> None:
    with pytest.raises(UsageError, match=r"NPROC_PER_NODE 4: more processes than the 2 visible GPUs\. Set "):
        check(dense, "", world=4, gpus=2)
    check(dense, "", world=4, gpus=0)  # a CPU takes as many as one likes


def test_how_long_to_train_must_be_said(dense: Path, capsys) -> None:
    assert main("megatron", ["sft", "--model", str(dense), "--dataset", "d"]) == 2
    assert "error: --train_iters, --num_train_epochs: missing." in capsys.readouterr().err


def test_files_of_data_that_are_not_there(dense: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    check(dense, f"--val_dataset {tmp_path}/rows.jsonl#5 {tmp_path} some/rows hf::some/rows:part")  # hubs are not asked
    for name in ("rows.csv", "./rows", f"{tmp_path}/none", "rows.jsonl#5"):
        said = rf"^--val_dataset {name.removesuffix('#5')}: no such file or folder \(in .*\)\. Fix the path\.$"
        with pytest.raises(UsageError, match=said):
            check(dense, f"--val_dataset d {name}")
        assert main("swift", ["infer", "--model", str(dense), "--val_dataset", name]) == 2
        assert "error: --val_dataset" in capsys.readouterr().err


def test_a_dataset_is_needed(dense: Path, capsys) -> None:
    assert main("megatron", ["pt", "--model", str(dense), "--train_iters", "1"]) == 2
    assert "error: --dataset: missing. Set" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none-such", "none", "a/b/c"])
@pytest.mark.parametrize("command", [("megatron", "sft"), ("swift", "infer")])
def test_no_such_model_folder(name: str, command: tuple[str, str], capsys) -> None:
    assert main(command[0], [command[1], "--model", name]) == 2
    assert f"--model {name}: no such model folder. Set a folder, or a hub id as OWNER/NAME." in capsys.readouterr().err


def test_the_model_is_needed(capsys) -> None:
    assert main("swift", ["infer"]) == 2
    assert "error: --model: missing. Set" in capsys.readouterr().err


def test_a_folder_without_a_config(tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    assert main("megatron", ["sft", "--model", str(tmp_path / "empty")]) == 2
    assert f"--model {tmp_path / 'empty'}: it has no config.json" in capsys.readouterr().err


def test_a_config_that_is_broken(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text("{")
    assert main("megatron", ["sft", "--model", str(tmp_path)]) == 2
    assert "config.json is not valid JSON" in capsys.readouterr().err


def test_an_output_folder_below_a_file(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match=r"--output_dir .*taken/x: .*taken is a file\. Set a writable folder"):
        check(dense, f"--output_dir {tmp_path / 'taken' / 'x'}")


def test_an_output_folder_that_cannot_be_written(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UsageError, match=r"--output_dir .*: .* cannot be written\. Set a writable folder"):
        check(dense, f"--output_dir {tmp_path / 'out'}")


def test_an_unknown_architecture(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", {"architectures": ["NewForCausalLM"]})
    with pytest.raises(UsageError) as error:
        check(model, "")
    assert f"--model {model}: config.json names the architecture NewForCausalLM" in str(error.value)
    assert "Qwen3ForCausalLM" in str(error.value)


@pytest.mark.parametrize("config", [{}, {"text_config": DENSE}])
def test_texts_beyond_the_positions(config: dict, tmp_path: Path) -> None:
    """A note, whether config.json says it of a text model or of one that sees too."""
    own = {"max_position_embeddings": 32}
    model = write_model(tmp_path / "m", {"text_config": DENSE | own} if config else DENSE | own)
    (note,) = check_infer(InferOptions(model=str(model), max_new_tokens=64))
    assert note.startswith("--max_new_tokens 64: up to 64 tokens, and the model has 32 positions (max_position_embed")
    assert check_infer(InferOptions(model=str(model), max_new_tokens=32)) == []


def test_an_output_folder_whose_name_is_too_long(dense: Path) -> None:
    with pytest.raises(UsageError, match=r"^--output_dir a{300}: File name too long\. Set another folder\.$"):
        check(dense, f"--output_dir {'a' * 300}")


@pytest.mark.parametrize("name", ["HF_HOME", "MODELSCOPE_CACHE"])
def test_a_cache_that_cannot_be_made(name: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("MODELSCOPE_CACHE", raising=False)
    monkeypatch.setenv(name, str(tmp_path / "file" / "x"))
    with pytest.raises(UsageError, match=rf"^{name}=.*file/x: the token cache cannot be made there"):
        check(dense, "")


def test_a_folder_in_which_another_run_is_at_work(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before processes start. Another process of this machine has the lock."""
    output = tmp_path / "out"
    output.mkdir()
    program = (
        "import sys, time; from pathlib import Path; from megaswift.tasks.run.run_dir import lock_run_dir;"
        "lock_run_dir(Path(sys.argv[1])); print('taken', flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(run_dir.check_idle, "__defaults__", (0.1,))
    options, _ = check(dense, f"--output_dir {output} --add_version false")
    check_lock(options)
    with subprocess.Popen([sys.executable, "-c", program, str(output)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(UsageError, match=r"^--output_dir .*out: another run uses .*out\. Wait for its end, or"):
            check_lock(options)
        check_lock(with_flags(options, add_version=True))
        other.kill()
    check_lock(options)


def test_infer_reads_no_pickles(dense: Path) -> None:
    (dense / "model.safetensors").rename(dense / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"^--model .*dense: has no weights: .* Its \.bin files are not read: convert"):
        check_infer(InferOptions(model=str(dense)))


@pytest.mark.parametrize("layers", [10_000_000, 2000])
def test_more_layers_than_tensors(dense: Path, layers: int) -> None:
    """Building them would take minutes before anything could say that they are not there."""
    (dense / "config.json").write_text(json.dumps(DENSE | {"num_hidden_layers": layers}))
    message = rf"config\.json has num_hidden_layers {layers}, and the folder's weights are 47 tensors\. Download"
    with pytest.raises(UsageError, match=message):
        check(dense, "")


@pytest.mark.parametrize(
    ("words", "more", "note"),
    [
        ("--max_length 32", {}, None),
        ("--max_length 33", {}, "--max_length 33: up to 33 tokens, and the model has 32 positions"),
        ("--packing true --packing_length 64", {}, "--packing_length 64: up to 64 tokens"),
        ("--packing true --packing_length 64 --max_length 32", {}, None),
        ("--max_length 64", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
        ("--max_length 129", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "the model has 128 positions"),
    ],
)
def test_training_texts_beyond_the_positions(words: str, more: dict, note: str | None, tmp_path: Path) -> None:
    notes = check(write_model(tmp_path / "m", DENSE | more | {"max_position_embeddings": 32}), words)[1]
    assert [note in each for each in notes] == [True] if note else notes == []


def test_sgd_has_no_state_to_share(dense: Path) -> None:
    options, (note,) = check(dense, "--optimizer sgd")
    assert options.build.use_distributed_optimizer is False  # type: ignore[attr-defined]
    assert note.startswith("--use_distributed_optimizer true is disabled")
    with pytest.raises(UsageError, match="--overlap_param_gather true cannot be used with --optimizer sgd"):
        check(dense, "--optimizer sgd --overlap_grad_reduce true --overlap_param_gather true")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--muon_momentum 0.9", "--muon_momentum 0.9: only for --optimizer muon or dist_muon. Set one of them"),
        ("--optimizer muon --tuner_type lora", "--optimizer muon cannot be used with --tuner_type lora: Muon"),
        (
            "--optimizer dist_muon --overlap_grad_reduce true --overlap_param_gather true",
            "--overlap_param_gather true cannot be used with --optimizer dist_muon, which sends parameters",
        ),
        ("--optimizer muon --lr 1e-3 --muon_min_lr 0.01", "--muon_min_lr 0.01: above --lr 0.001. Set a lower one"),
        ("--optimizer muon --muon_lr 1e-3 --muon_min_lr 0.01", "--muon_min_lr 0.01: above --muon_lr 0.001. Set a"),
        ("--optimizer muon --muon_tp_mode each", "--muon_tp_mode each: choose one of duplicated, distributed, block"),
        ("--optimizer muon --muon_scalar_optimizer lion", "--muon_scalar_optimizer lion: "),
    ],
)
def test_what_muon_cannot_do(dense: Path, words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(dense, words)
    assert str(caught.value).startswith(message)


def test_muon_needs_whole_matrices(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, (note,) = check(dense, "--optimizer muon")
    assert options.build.use_distributed_optimizer is False
    assert note == (
        "--use_distributed_optimizer true is disabled: Muon needs whole matrices (dist_muon divides its state)."
    )
    words = f"--optimizer muon {TP} 8"
    with pytest.raises(UsageError, match=r"--muon_split_qkv true: --tensor_model_parallel_size 8 splits the model's 4"):
        check(dense, words, world=8)
    check(dense, f"{words} --muon_split_qkv false", world=8)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--optimizer muon: emerging-optimizers is not installed\. Run `pip install"):
        check(dense, "--optimizer muon")


def test_a_reporter_that_is_not_installed(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--report_to wandb: the package wandb is not installed\. Install it"):
        check(dense, "--report_to wandb")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--temperature -1", "--temperature -1.0: must be at least 0."),
        ("--max_batch_size 0", "--max_batch_size 0: must be at least 1."),
        ("--top_p 1.5", "--top_p 1.5: must be above 0 and at most 1."),
        ("--repetition_penalty 0", "--repetition_penalty 0.0: must be above 0."),
    ],
)
def test_what_infer_cannot_do(words: str, message: str, dense: Path, capsys: pytest.CaptureFixture) -> None:
    assert main("swift", ["infer", "--model", str(dense), *words.split()]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_layout_sizes() -> None:
    layout = ProcessLayout(world=32, tensor=2, pipeline=2, context=2, expert=4, expert_tensor=1)
    assert (layout.data, layout.expert_data) == (4, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--resume_from_checkpoint nowhere", "--resume_from_checkpoint nowhere: no such folder. Set a checkpoint's"),
        ("--finetune false --resume_from_checkpoint auto", "--resume_from_checkpoint auto: differs from"),
        (
            "--finetune false --tuner_type lora",
            "--finetune false: no checkpoint to resume from. Set --mcore_adapter or --adapters",
        ),
        (
            "--async_save true --save_safetensors false",
            "--async_save true cannot be used with --save_safetensors false",
        ),
        (
            "--metric_for_best_model acc --val_dataset d",
            "--metric_for_best_model acc: evaluations have loss, mtp_loss",
        ),
        ("--metric_for_best_model= --eval_command true", "--metric_for_best_model: is empty. Set loss, or remove it."),
        ("--metric_for_best_model loss", "--metric_for_best_model: nothing is evaluated. Set --val_dataset"),
        ("--eval_command no-such-program", "--eval_command no-such-program: there is no program no-such-program. Set"),
        ("--exit_duration_in_mins 0", "--exit_duration_in_mins 0.0: must be above 0."),
    ],
)
def test_what_saving_and_resuming_cannot_be(dense: Path, words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(dense, words)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", '--eval_command "": is empty'),
        ("python 'a", "--eval_command python 'a: No closing quotation. Close"),
        ("python a.py {checkpoint} | tail -1", "no shell runs it, so | would be one of its arguments. Put it into a"),
        ("cd x && python a.py", "no shell runs it, so && would"),
        ("python a.py > out", "no shell runs it, so > would"),
        ("CUDA_VISIBLE_DEVICES=1 python a.py", "no shell runs it, so CUDA_VISIBLE_DEVICES=1 sets no variable."),
    ],
)
def test_commands_that_need_a_shell(dense: Path, command: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        list(check_resume(compose(SftOptions, model="m", eval_command=command)))
    assert message in str(caught.value)


def test_a_command_may_have_any_metric(dense: Path) -> None:
    words = "--eval_command python3 --metric_for_best_model acc --greater_is_better true"
    assert check(dense, words)[1] == []
    assert check(dense, "--eval_command_timeout 9")[1] == [
        "--eval_command_timeout is not needed: there is no --eval_command."
    ]


def test_flags_of_resuming_without_it_are_told(dense: Path) -> None:
    assert check(dense, "--no_load_optim true")[1] == ["--no_load_optim true is not needed: nothing is resumed."]
    assert check(dense, "--no_load_optim true --resume_from_checkpoint auto")[1] == []
