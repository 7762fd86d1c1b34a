"""Options from command lines and config files, and each value's source."""

import json
import os
import re
from pathlib import Path

import pytest
from megaswift.bridge.option_groups import flag_value, flag_values
from megaswift.cli.commands import COMMANDS
from megaswift.cli.flags import UsageError, flags_of
from megaswift.cli.main import main, read_options
from megaswift.tasks import options
from megaswift.tasks.run.args_json import save_args

BASE = ["sft", "--model", "m", "--train_iters", "1", "--no_save_optim", "true"]


def read(*words: str):
    return read_options("megatron", [*BASE, *words])


def refusal(*words: str, program: str = "megatron") -> str:
    with pytest.raises(UsageError) as error:
        read_options(program, [*BASE, *words] if program == "megatron" else list(words))
    return str(error.value)


def test_the_dialect() -> None:
    options, sources, notes = read(
        *("--dataset", "a#5", "b c.jsonl", "--lr=2e-5", "--use_hf", "--packing", "false", "--eval_iters", "-1"),
        *("--micro-batch-size", "2", "--columns", '{"old": "new"}', "--save_steps", "1e3", "--strict", "TRUE"),
        *("--recompute_modules", "core_attn", "mlp"),
    )
    assert options.data.dataset == ["a#5", "b c.jsonl"]
    assert (
        options.schedule.lr,
        options.use_hf,
        options.data.packing,
        options.training.eval_iters,
        options.data.strict,
    ) == (
        2e-5,
        True,
        False,
        -1,
        True,
    )
    assert (options.training.micro_batch_size, options.data.columns, options.checkpoint.save_steps) == (
        2,
        {"old": "new"},
        1000,
    )
    assert options.build.recompute_modules == ["core_attn", "mlp"]
    assert sources["lr"] == sources["packing"] == "command line"
    assert sources["min_lr"] == "default"
    assert notes == []


def test_pt_has_its_own_defaults() -> None:
    assert read_options("megatron", ["pt", "--model", "m"])[0].data.loss_scale == "all"
    assert read_options("megatron", ["sft", "--model", "m"])[0].data.loss_scale == "default"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "abc"], "--lr abc: a number is needed."),
        (["--lr", "nan"], "--lr nan: a number is needed."),
        (["--save_steps", "1.5"], "--save_steps 1.5: a whole number is needed."),
        (["--save_steps", "many"], "--save_steps many: a whole number is needed."),
        (["--save_steps", "inf"], "--save_steps inf: a whole number is needed."),
        (["--packing", "maybe"], "--packing maybe: true or false is needed."),
        (["--optimizer", "lion"], "--optimizer lion: choose one of adam, sgd, muon, dist_muon."),
        (
            ["--report_to", "tensorboard", "x"],
            "--report_to x: choose one of tensorboard, wandb, swanlab, mlflow, trackio, none.",
        ),
        (["--columns", "{old: new}"], "--columns {old: new}: not valid JSON"),
        (["--columns", '{"query": 3}'], '--columns {"query": 3}: each value must be text'),
        (["--columns", "[1]"], "--columns [1]: a JSON object is needed"),
        (["--lr", "1", "2"], "--lr 1 2: takes one value."),
        (["--lr"], "--lr: no value. Set number."),
        (["--val_dataset"], "--val_dataset: no value. Set text ...."),
        (["--micro_batchsize", "2"], "--micro_batchsize: no such flag. The nearest is --micro_batch_size."),
        (["--learning_rate", "2"], "--learning_rate: no such flag. The nearest is --lr."),
        (
            ["--beta", "0.1"],
            "--beta: a flag of `megatron rlhf --rlhf_type dpo|orpo|simpo|cpo|kto|grpo|ppo|gkd`, not of this command.",
        ),
        (["--temperature", "0"], "--temperature: a flag of `megatron rlhf --rlhf_type grpo|ppo|gkd`, not of this"),
        (["--config", "none.yaml"], "--config none.yaml: no such file."),
    ],
)
def test_what_no_flag_takes(words: list[str], message: str) -> None:
    assert message in refusal(*words)


@pytest.mark.parametrize(
    ("words", "lr", "merge"),
    [
        ([], 1e-5, None),
        (["--tuner_type", "lora"], 1e-4, True),
        (["--tuner_type", "lora", "--save_safetensors", "false"], 1e-4, False),
    ],
)
def test_what_follows_from_the_tuner(words: list[str], lr: float, merge: bool | None, tmp_path: Path) -> None:
    options, sources, _ = read(*words)
    assert (options.schedule.lr, options.merge_lora) == (lr, merge)
    assert sources["lr"] == "derived"
    assert sources["merge_lora"] == ("default" if merge is None else "derived")
    save_args(tmp_path / "args.json", options, sources)
    assert json.loads((tmp_path / "args.json").read_text())["options"]["lr"] == {"value": lr, "source": "derived"}
    other = "full" if words else "lora"
    again, sources, _ = read("--config", str(tmp_path / "args.json"), "--tuner_type", other)
    assert (again.schedule.lr, sources["lr"]) == ({"lora": 1e-4, "full": 1e-5}[other], "derived")

    options, sources, _ = read(*words, "--lr", "3e-5", "--merge_lora", "false")
    assert (options.schedule.lr, options.merge_lora) == (3e-5, False)
    assert sources["lr"] == sources["merge_lora"] == "command line"


def test_a_flag_of_training_is_not_one_of_infer() -> None:
    assert "--lr: a flag of `megatron sft`" in refusal("infer", "--model", "m", "--lr", "1", program="swift")
    said = refusal("infer", "--model", "m", "--dataset", "d", program="swift")
    assert said == "--dataset: no such flag. The nearest is --val_dataset."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cutoff_len", "no such flag. The nearest is --max_length."),
        ("model_name_or_path", "no such flag. The nearest is --model."),
        ("finetuning_type", "no such flag. The nearest is --tuner_type. It is full or lora."),
        (
            "deepspeed",
            "no such flag. The nearest is --use_distributed_optimizer. DeepSpeed is not used: megatron-core's "
            "distributed optimizer shards the state.",
        ),
        ("neftune_noise_alpha", "no such flag. NEFTune is not available. Remove the flag."),
        ("per_device_train_batch_size", "no such flag. The nearest is --micro_batch_size."),
        ("xyzzyx", "no such flag. --help lists all flags."),
    ],
)
def test_names_of_other_trainers(name: str, message: str) -> None:
    assert refusal(f"--{name}", "1") == f"--{name}: {message}"


def test_unknown_flags_that_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("ignore_args_error: true\nxyzzyx: 3\nlr: 2e-5\n")
    for words in (["--ignore_args_error", "true", "--xyzzyx", "3", "--lr", "2e-5"], [str(tmp_path / "run.yaml")]):
        options, _, notes = read_options("megatron", ["sft", *words])
        assert options.schedule.lr == 2e-5
        assert [note.split(" (from")[0].split(" It is")[0] for note in notes] == [
            "--xyzzyx: no such flag. --help lists all flags."
        ]
    assert "no such flag" in refusal("--ignore_args_error", "false", "--xyzzyx", "3")
    assert "true or false" in refusal("--ignore_args_error", "maybe")
    # Values, and features that are known and lacking, remain errors.
    assert "a number is needed" in refusal("--ignore_args_error", "true", "--lr", "abc")
    assert "no support for groups of Ray" in refusal("--ignore_args_error", "true", "--device_groups", "actor")


def test_names_of_other_trainers_lead_to_flags() -> None:
    from megaswift.cli.accepted_flags import ALWAYS_TRUE, NO_EFFECT
    from megaswift.cli.foreign_flags import FOREIGN_FLAGS
    from megaswift.cli.legacy_flags import RENAMED
    from megaswift.cli.unsupported_flags import UNSUPPORTED

    known = {flag for _, _, flag in every_flag()}
    assert not {entry.flag for entry in FOREIGN_FLAGS.values()} - known - {""}
    assert not set(FOREIGN_FLAGS) & {*RENAMED, *ALWAYS_TRUE, *NO_EFFECT, *UNSUPPORTED}  # which come first
    assert not (set(FOREIGN_FLAGS) & known) - {"dataset"}
    for entry in FOREIGN_FLAGS.values():
        named = set(re.findall(r"--(\w+)", entry.note))
        assert named <= known
        assert entry.flag or entry.note


def every_flag() -> list[tuple[str, str, str]]:
    """Yield each flag with its program and command."""
    return [
        (program, name, flag)
        for program, commands in COMMANDS.items()
        for name, command in commands.items()
        for kind in command.kinds.values()
        for flag in flags_of(getattr(options, kind.options))
    ]


def test_a_flag_of_the_other_programs_export() -> None:
    said = refusal("export", "--model", "m", "--tensor_model_parallel_size", "2", program="swift")
    assert said == (
        "--tensor_model_parallel_size: a flag of `megatron export`, not of this command. Use that, or remove it."
    )


def test_a_list_that_is_given_twice(tmp_path: Path) -> None:
    said = refusal("--dataset", "a", "b", "--lr", "1", "--dataset=c")
    assert said == "--dataset: is set twice. Lists take spaces: --dataset a b c"
    (tmp_path / "run.yaml").write_text("val_dataset: [a, b]\n")
    options, *_ = read("--config", str(tmp_path / "run.yaml"), "--val_dataset", "c", "--lr", "1", "--lr", "2")
    assert (options.data.val_dataset, options.schedule.lr) == (["c"], 2.0)


def test_a_word_that_is_no_flag() -> None:
    with pytest.raises(UsageError, match=r"config: not a flag\. Begin flags with --"):
        read_options("megatron", ["sft", "config", "--model", "m"])


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--save", "out"], "output_dir", "out"),
        (["--save_interval", "7"], "save_steps", 7),
        (["--max_epochs", "2"], "num_train_epochs", 2.0),
        (["--num_workers", "0"], "dataloader_num_workers", 0),
        (["--no_rope_fusion"], "apply_rope_fusion", False),
        (["--no_bias_dropout_fusion", "true"], "bias_dropout_fusion", False),
        (["--no_bias_dropout_fusion", "false"], "bias_dropout_fusion", True),
        (["--distributed_timeout_minutes", "10"], "ddp_timeout", 600),
        (["--bf16", "true"], "torch_dtype", "bfloat16"),
        (["--fp16"], "torch_dtype", "float16"),
        (["--train_type", "lora"], "tuner_type", "lora"),
        (["--adapter_load", "a"], "mcore_adapter", "a"),
        (["--num_virtual_stages_per_pipeline_rank", "2"], "virtual_pipeline_model_parallel_size", 2),
    ],
)
def test_older_names(words: list[str], name: str, value: object) -> None:
    options, sources, notes = read(*words)
    assert flag_value(options, name) == value
    assert sources[name] == "command line"
    (note,) = notes
    assert note.startswith(words[0])
    assert f"--{name}" in note


def test_older_names_that_ask_for_nothing() -> None:
    options, _, notes = read("--fp16", "false")
    assert options.torch_dtype is None
    assert notes == ["--fp16 false has no effect: it leaves --torch_dtype as it is."]


def test_flags_that_nothing_here_needs() -> None:
    assert read("--load_safetensors", "true", "--cross_entropy_loss_fusion")[2] == []
    (always, needless) = read("--cross_entropy_loss_fusion", "false", "--ckpt_format", "torch_dist")[2]
    assert always.startswith("--cross_entropy_loss_fusion false has no effect: the loss is computed in pieces")
    assert (
        needless
        == "--ckpt_format torch_dist has no effect: --save_safetensors chooses: Hugging Face folders, or torch_dist."
    )


def test_reasons_are_short_and_fixes_name_flags() -> None:
    from megaswift.cli.accepted_flags import ALWAYS_TRUE, NO_EFFECT
    from megaswift.cli.unsupported_flags import UNSUPPORTED

    known = {flag for _, _, flag in every_flag()} | {"config", "help"}
    reasons = [*ALWAYS_TRUE.values(), *NO_EFFECT.values()]
    assert [reason for reason in reasons if len(reason.split()) > 12] == []
    texts = [*reasons, *(unsupported.fix for unsupported in UNSUPPORTED.values())]
    assert {flag for text in texts for flag in re.findall(r"--(\w+[a-z])\b", text)} - known == set()


@pytest.mark.parametrize("words", ["--moe_router_bias_update_rate 0.0", "--num_beams 1.0", "--main_grads_dtype fp32"])
def test_values_that_ask_for_nothing(words: str) -> None:
    assert read(*words.split())[2] == []
    assert "no support for" in refusal(words.split()[0], "0.5")


@pytest.mark.parametrize(
    ("words", "kernel"),
    [("--use_flash_attn true", "flash"), ("--attn_impl flash_attention_2", "flash_2"), ("--attn_impl sdpa", "auto")],
)
def test_older_names_of_attention_kernels(words: str, kernel: str) -> None:
    assert read(*words.split())[0].build.attention_backend == kernel
    assert read_options("swift", ["infer", "--model", "m", *words.split()])[0].attention_backend == kernel
    _, _, notes = read_options("swift", ["rollout", "--model", "m", *words.split()])
    assert notes == [f"{words} has no effect: transformers and vLLM choose their kernel."]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--attn_impl flash", "--attn_impl flash: choose one of flash_attn, flash_attention_2, "),
        ("--attn_impl=", "--attn_impl: choose one of flash_attn, "),
        ("--attn_impl", "--attn_impl: choose one of flash_attn, "),
        ("--use_flash_attn 2", "--use_flash_attn 2: true or false is needed."),
        ("--bf16=", "--bf16: true or false is needed."),
        ("--no_rope_fusion x", "--apply_rope_fusion x: true or false is needed. It is written as --no_rope_fusion x."),
        ("--distributed_timeout_minutes x", "--ddp_timeout x: a whole number is needed. It is written as --distr"),
    ],
)
def test_wrong_values_of_older_names(words: str, message: str) -> None:
    assert refusal(*words.split()).startswith(message)


def test_unsupported_values_come_before_the_flags_that_belong_to_them() -> None:
    awq = "export --model m --dataset d --quant_n_samples 256 --quant_bits 4 --quant_method awq"
    assert refusal(*awq.split(), program="swift").startswith("--quant_method awq: no support for AWQ. Set --quant_m")


def test_older_values() -> None:
    options, _, notes = read_options("swift", ["infer", "--model", "m", "--infer_backend", "pt"])
    assert options.infer_backend == "transformers"
    assert notes == [
        "--infer_backend pt is an older spelling of --infer_backend transformers; the older one still works."
    ]


NEUTRAL = """--tuner_backend peft --finetune true --optimizer_cpu_offload false --use_swift_lora false
    --no_save_rng true --optimizer_offload_fraction 1.0 --no_load_optim --freeze_vit true --freeze_llm false"""


def test_later_features_switched_off_are_accepted() -> None:
    assert read(*NEUTRAL.split())[2] == []


@pytest.mark.parametrize(
    ("words", "feature"),
    [
        ("--tuner_backend unsloth", "LoRA"),
        ("--fp4_format e2m1", "FP4"),
        ("--optimizer_cuda_graph true", "CUDA graphs"),
        ("--cpu_offloading_weights true", "offload of weights"),
    ],
)
def test_later_features_are_refused_by_name(words: str, feature: str) -> None:
    message = refusal(*words.split())
    assert message.startswith(f"{words}: no support for ")
    assert feature in message


def test_config_file_and_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FROM_CONFIG", raising=False)
    monkeypatch.setenv("ALREADY_SET", "mine")
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: m\ndataset: [a, b]\nlr: 2e-5\nmin_lr: 1.0e-6\npacking: true\ncolumns: {old: new}\nsave_interval: 9\n"
        "eval_steps: null\nreport_to: []\nENV: {FROM_CONFIG: 1, ALREADY_SET: theirs}\n"
    )
    for words in (["sft", str(file), "--lr", "3e-5"], ["sft", "--lr", "3e-5", "--config", str(file)]):
        options, sources, notes = read_options("megatron", words)
        assert (options.schedule.lr, options.schedule.min_lr, options.data.packing, options.checkpoint.save_steps) == (
            3e-5,
            1e-6,
            True,
            9,
        )
        assert (options.data.dataset, options.data.columns, options.logging.report_to, options.training.eval_steps) == (
            ["a", "b"],
            {"old": "new"},
            [],
            None,
        )
        assert (sources["lr"], sources["min_lr"], sources["seed"]) == ("command line", str(file), "default")
        assert any("--save_interval 9 is an older spelling" in note for note in notes)
    assert (os.environ.pop("FROM_CONFIG"), os.environ["ALREADY_SET"]) == ("1", "mine")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "lrr: 1", "--lrr: no such flag. The nearest is --lr. (from {file})"),
        ("c.yaml", "lr: high", "--lr high: a number is needed (from {file})."),
        ("c.yaml", "lr: [1, 2]", "--lr 1 2: takes one value (from {file})."),
        ("c.yaml", "ENV: 3", "ENV: 3: not a table of variable: value (from {file})."),
        ("c.yaml", "ENV: {'': 1}", 'ENV: {{"": 1}}: not a variable and its value (from {file}).'),
        ("c.yaml", "ENV: {A=B: 1}", 'ENV: {{"A=B": 1}}: not a variable and its value (from {file}).'),
        ("c.yaml", "3: 4", "--config {file}: 3 is not the name of a flag."),
        ("c.yaml", "lr: 1\nseed: 3\nlr: 2", "cannot be read: lr is in line 1 and again in line 3. Remove one"),
        ("c.yaml", "system: no", "--system false: text is needed: put it in quotes (from {file})."),
        ("c.yaml", "- lr", "--config {file}: not a table of flag: value."),
        ("c.yaml", "lr: [", "--config {file}: cannot be read:"),
        ("c.json", '{"lr": 1,}', "--config {file}: cannot be read:"),
        (
            "c.json",
            '{"device_groups": "actor"}',
            "--device_groups actor (from {file}): no support for groups of Ray's processes. Set NPROC_PER_NODE",
        ),
        ("c.json", '{"micro_batch_size": true}', "--micro_batch_size true: a whole number is needed (from {file})."),
    ],
)
def test_faults_of_a_config_file(name: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert message.format(file=file) in refusal("--config", str(file))


def test_saved_arguments_can_be_given_back(tmp_path: Path) -> None:
    options, sources, _ = read(
        "--lr", "3e-5", "--columns", '{"a": "b"}', "--hub_token", "secret", "--report_to", "none"
    )
    options.build.sequence_parallel, sources["sequence_parallel"] = True, "derived"
    save_args(tmp_path / "args.json", options, sources, kernels="local")
    written = (tmp_path / "args.json").read_text()
    assert "secret" not in written
    assert json.loads(written)["options"]["lr"] == {"value": 3e-5, "source": "command line"}
    assert json.loads(written)["kernels"] == "local"

    again, sources, _ = read_options("megatron", ["sft", "--config", str(tmp_path / "args.json"), "--no_save_optim"])
    assert flag_values(again) == flag_values(options) | {"hub_token": None, "sequence_parallel": False}
    assert sources["lr"] == str(tmp_path / "args.json")
    assert sources["min_lr"] == "default"


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        ("megatron", ["stf"], "megatron stf: no such command. The nearest is sft."),
        ("swift", ["--model", "m"], "swift --model: no such command."),
    ],
)
def test_commands_that_are_not_there(program: str, words: list[str], message: str, capsys) -> None:
    assert main(program, words) == 2
    assert f"error: {message}" in capsys.readouterr().err
