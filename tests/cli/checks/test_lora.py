"""Checks of adapters and frozen weights before anything is loaded; an adapter's settings are copied to the options."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from megaswift.cli import main as cli
from megaswift.cli.checks.common import check_training
from megaswift.cli.flags import UsageError
from megaswift.cli.main import main, read_options
from megaswift.tasks.options import SftOptions
from megaswift.tasks.run.planning import ProcessLayout

from tests.cli.checks.test_export import mcore
from tests.cli.conftest import DENSE, MIXTURE, write_model

LORA = "--tuner_type lora"


def check(words: str, model: Path | None) -> tuple[SftOptions, dict[str, str], list[str]]:
    line = ["sft", *(["--model", str(model)] if model else []), "--dataset", "d", "--train_iters", "1", *words.split()]
    options, sources, _ = read_options("megatron", line)
    notes = check_training(options, ProcessLayout.of(options.build, 1), gpus=0, processes=1, sources=sources)
    return options, sources, notes


def refusal(words: str, model: Path | None) -> str:
    with pytest.raises(UsageError) as error:
        check(words, model)
    return str(error.value)


def write_adapter(folder: Path, base: Path | str | None, **config: object) -> Path:
    """An adapter's folder as PEFT writes it, of which the file has just the header."""
    folder.mkdir(exist_ok=True)
    targets = config.get("target_modules", ["v_proj", "q_proj"])
    names = [f"base_model.model.model.layers.{n}.self_attn.{name}.lora_A.weight" for n in range(4) for name in targets]
    header = json.dumps({name: {"dtype": "F32", "shape": [], "data_offsets": [0, 0]} for name in names}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["v_proj", "q_proj"]}
    named = {"base_model_name_or_path": None if base is None else str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(usual | named | config))
    return folder


@pytest.fixture
def adapter(dense: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", dense)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return the options of the run after the checks."""
    ran: list = []
    monkeypatch.setattr(cli, "_run", lambda command, options, sources: ran.append(options) or 0)
    return ran


@pytest.mark.parametrize(
    "words",
    [
        "--lora_rank 8",  # the default, but who gives it means LoRA
        "--lora_alpha 16",
        "--lora_dropout 0.1",
        "--lora_bias all",
        "--lora_dtype float32",
        "--use_rslora true",
        "--use_dora true",
        "--target_modules all-linear",
        "--target_regex .*q_proj",
        "--modules_to_save lm_head",
        "--merge_lora true",
        "--adapters a",
        "--mcore_adapter a",
        "--lorap_lr_ratio 16.0",
    ],
)
def test_flags_of_lora_without_it(words: str, dense: Path) -> None:
    expected = f"{words}: only for --tuner_type lora, and --tuner_type full trains all weights."
    assert refusal(words.replace("16.0", "16"), dense).startswith(expected.replace("alpha 16", "alpha 16.0"))


def test_flags_of_lora_that_ask_for_nothing(dense: Path) -> None:
    words = "--merge_lora false --lora_bias none --use_rslora false --use_dora false --tuner_type full"
    assert check(words, dense)[2] == []


def test_flags_of_lora_in_a_config_file(dense: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lora_rank: 8\nmodules_to_save: []\ntarget_regex: null\n")
    assert refusal(f"--config {file}", dense).startswith("--lora_rank 8: only for --tuner_type lora")
    assert check(f"--config {file} {LORA}", dense)[0].lora.lora_rank == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora_rank 0", "--lora_rank 0: must be above 0."),
        ("--lora_rank 65", "--lora_rank 65: larger than the model's hidden_size 64. Set a"),
        ("--lora_alpha 0", "--lora_alpha 0.0: must be above 0."),
        ("--lora_dropout 1", "--lora_dropout 1.0: must be at least 0 and below 1."),
        ("--lora_dropout -0.1", "--lora_dropout -0.1: must be at least 0 and below 1."),
        ("--lorap_lr_ratio 0", "--lorap_lr_ratio 0.0: must be above 0."),
        (
            "--target_modules q_proj --target_regex .*q_proj",
            "--target_regex .*q_proj cannot be used with --target_modules. Remove one of them.",
        ),
        ("--target_regex [", "--target_regex [: not a regular expression"),
        ("--target_regex model.layers.9.*", "--target_regex model.layers.9.* matches no module of this model."),
        ("--target_modules q_proj query", "--target_modules query matches no module of this model. Its modules: "),
        ("--target_modules lm_head", "--target_modules lm_head: the output layer supports no adapter. Set"),
        ("--target_modules output_layer", "--target_modules output_layer: the output layer supports no adapter."),
        (
            "--modules_to_save norm",
            "--modules_to_save norm: what is trained whole of this model is embed_tokens and lm_head.",
        ),
        ("--lora_bias all", "--lora_bias all: this model has no biases there"),
        ("--use_dora true --target_modules all-embedding", "--use_dora is not for embeddings"),
        ("--adapters a b", "--adapters a b: only one adapter is"),
        ("--adapters a --mcore_adapter b", "--adapters a --mcore_adapter b: only one adapter is"),
        (
            "--merge_lora true --save_safetensors false",
            "--merge_lora true cannot be used with --save_safetensors false, which saves the adapter only. Remove one "
            "of them.",
        ),
        ("--fp8_param_gather true", "--fp8_param_gather true cannot be used with --tuner_type lora in this version"),
        ("--freeze_parameters model.", "--freeze_parameters model. cannot be used with --tuner_type lora"),
        ("--apply_wd_to_qk_layernorm true", "--apply_wd_to_qk_layernorm true cannot be used with --tuner_type lora"),
        ("--freeze_parameters_ratio 0.5", "--freeze_parameters_ratio 0.5 cannot be used with --tuner_type lora"),
        (
            "--trainable_parameters_regex norm",
            "--trainable_parameters_regex norm cannot be used with --tuner_type lora",
        ),
    ],
)
def test_what_lora_cannot_be(words: str, message: str, dense: Path) -> None:
    assert message in refusal(f"{LORA} {words}", dense)


def test_the_models_own_targets(dense: Path, mixture: Path) -> None:
    for words in ("", "--target_regex .*layers.3.*q_proj", "--target_modules linear_qkv o_proj", "--lora_rank 64"):
        check(f"{LORA} {words}", dense)
    assert "--lora_dropout 0.1 is not for" in refusal(f"{LORA} --lora_dropout 0.1", mixture)
    assert "--use_dora true is not for" in refusal(f"{LORA} --use_dora true", mixture)
    check(f"{LORA} --target_modules linear_qkv all-router --lora_dropout 0", mixture)


def test_experts_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    """Of one family, some checkpoints have all experts in one tensor; others one by one, gates beside ups."""
    one_by_one = [f"{each}.{name}_proj.weight" for each in (0, 1) for name in ("gate", "up", "down")]
    for stored, targets in ((["gate_up_proj", "down_proj"], "gate_up_proj"), (one_by_one, "gate_proj up_proj")):
        config = MIXTURE | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
        config |= {"num_hidden_layers": 1, "num_experts": 2, "layer_types": ["full_attention"]}
        config |= {"shared_expert_intermediate_size": 24}
        model = write_model(tmp_path / "model", config)
        names = [f"model.layers.0.mlp.experts.{name}" for name in stored]
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "")}))
        check(f"{LORA} --target_modules linear_proj linear_fc1 linear_fc2", model)
        check(f"{LORA} --target_modules {targets} down_proj", model)
        assert "experts have adapters" in refusal(f"{LORA} --target_modules linear_proj linear_fc2", model)


def test_an_empty_list_of_targets(dense: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("tuner_type: lora\ntarget_modules: []\n")
    assert "--target_modules: is empty. Set modules, as in" in refusal(f"--config {file}", dense)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--freeze_parameters_ratio 1.5", "--freeze_parameters_ratio 1.5: must be at least 0 and at most 1."),
        ("--freeze_parameters_ratio -1", "--freeze_parameters_ratio -1.0: must be at least 0 and at most 1."),
        ("--freeze_parameters_ratio 1", "--freeze_parameters_ratio 1.0: freezes all weights. Set"),
        ("--trainable_parameters lm_head", "--trainable_parameters lm_head: nothing is frozen"),
        (
            "--freeze_parameters lm_head --fp8_param_gather true",
            "--freeze_parameters lm_head cannot be used with --fp8_param_gather true",
        ),
        ("--freeze_parameters_regex (", "--freeze_parameters_regex (: not a regular expression"),
        ("--freeze_parameters m --trainable_parameters_regex *", "--trainable_parameters_regex *: not a regular expr"),
    ],
)
def test_what_cannot_be_frozen(words: str, message: str, dense: Path) -> None:
    assert message in refusal(words, dense)


def test_what_can_be_frozen(dense: Path) -> None:
    check("--freeze_parameters model.embed_tokens --freeze_parameters_ratio 0.5", dense)
    check("--freeze_parameters_ratio 1 --trainable_parameters lm_head", dense)


def test_the_run_starts_from_an_adapter(adapter: Path, dense: Path) -> None:
    options, _, notes = check(f"{LORA} --adapters {adapter}", None)
    assert options.model == str(dense)
    assert (options.lora.lora_rank, options.lora.lora_alpha, options.lora.lora_dropout) == (4, 16, 0.1)
    assert options.lora.target_modules == ["q_proj", "v_proj"]
    assert notes == [f"--model {dense}: the base model that --adapters {adapter} names."]

    same = "--lora_rank 4 --lora_alpha 16 --target_modules q_proj v_proj --lora_dropout 0.2 --lora_dtype float32"
    options, _, notes = check(f"{LORA} --adapters {adapter} {same}", dense)
    assert (options.lora.lora_dropout, options.lora.lora_dtype) == (0.2, "float32")
    assert notes == []
    options, _, _ = check(f"{LORA} --adapters {adapter} --use_rslora true --lora_alpha 8", dense)  # the same scaling
    assert (options.lora.lora_alpha, options.lora.use_rslora) == (8, True)


def test_args_json_tells_what_the_adapter_says(adapter: Path, rows: Path, ran: list, monkeypatch) -> None:
    told: dict[str, str] = {}
    monkeypatch.setattr(cli, "_run", lambda command, options, sources: told.update(sources) or 0)
    words = f"sft {LORA} --adapters {adapter} --dataset {rows} --train_iters 1".split()
    assert main("megatron", words) == 0
    names = ("model", "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "lr", "merge_lora")
    assert {told[name] for name in names} == {"derived"}
    assert told["lora_bias"] == "default"


@pytest.mark.parametrize(
    ("words", "has"),
    [
        ("--lora_rank 8", "4"),
        ("--lora_alpha 32", "16"),
        ("--use_rslora true", "false"),
        ("--use_dora true", "false"),
        ("--lora_bias all", "none"),
    ],
)
def test_an_adapter_that_says_otherwise(words: str, has: str, adapter: Path, dense: Path) -> None:
    said = refusal(f"{LORA} --adapters {adapter} {words}", dense)
    written = words.replace("32", "32.0")
    expected = f"{written}: the adapter to continue, --adapters {adapter}, has {has}. Remove it"
    assert said.startswith(expected)


def test_an_adapter_of_other_targets(adapter: Path, dense: Path) -> None:
    for words in ("--target_modules all-linear", "--target_regex .*q_proj", "--modules_to_save lm_head"):
        said = refusal(f"{LORA} --adapters {adapter} {words}", dense)
        assert said.startswith(f"{words}: the adapter to continue, --adapters {adapter}, has others.")
    _, _, notes = check(f"{LORA} --adapters {adapter} --target_modules all-linear --model owner/name", None)
    assert any("--target_modules all-linear: the adapter to continue" in note for note in notes)
    check(f"{LORA} --adapters {adapter} --target_regex .*\\.[qv]_proj", dense)
    write_adapter(adapter, dense, modules_to_save=["lm_head"])
    options, _, _ = check(f"{LORA} --adapters {adapter} --modules_to_save output_layer", dense)
    assert options.lora.modules_to_save == ["lm_head"]


def test_folders_that_are_no_adapter(adapter: Path, dense: Path, tmp_path: Path) -> None:
    def said(folder: Path | str) -> str:
        return refusal(f"{LORA} --adapters {folder}", dense)

    for name in (tmp_path / "none", "./none", "none", adapter / "adapter_config.json"):
        assert (
            f"--adapters {name}: no such folder. Set the folder of an adapter (a run's checkpoint-N), or a hub"
            in said(name)
        )
    assert f"--adapters {dense}: there is no adapter_config.json in it. It is a full model" in said(dense)
    run = tmp_path / "run"
    run.mkdir()
    shutil.copytree(adapter, run / "checkpoint-7")
    assert f"Is it {run / 'checkpoint-7'} that you mean?" in said(run)
    (adapter / "adapter_config.json").write_text("{")
    assert "adapter_config.json is not valid JSON" in said(adapter)
    write_adapter(adapter, dense, peft_type="IA3")
    assert "adapter_config.json has peft_type 'IA3': only LORA is known" in said(adapter)
    write_adapter(adapter, dense, target_modules=["experts"])
    assert "one of the two fused matrices has an adapter, which is not read" in said(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"cut")
    assert "adapter_model.safetensors: not a safetensors file" in said(adapter)
    check(f"{LORA} --adapters owner/name", dense)  # a hub's: the task looks


def test_an_adapter_given_as_a_model(adapter: Path, tmp_path: Path) -> None:
    assert refusal("", adapter) == f"--model {adapter}: is an adapter. Set it as --adapters."
    delta = mcore(tmp_path / "delta", None)
    shutil.copy(adapter / "adapter_config.json", delta)
    said = f"--mcore_model {delta}: is an adapter. Set it as --mcore_adapter."
    assert refusal(f"{LORA} --mcore_model {delta}", None) == said


def test_a_base_that_is_gone(dense: Path, tmp_path: Path, ran: list, capsys) -> None:
    gone, none = write_adapter(tmp_path / "a", tmp_path / "gone"), write_adapter(tmp_path / "b", None)
    for command in (
        ("megatron", "sft", "--tuner_type", "lora"),
        ("swift", "export", "--merge_lora"),
        ("swift", "infer"),
    ):
        program, *words = command
        for folder, why in ((gone, f"{tmp_path / 'gone'}, does not exist"), (none, "does not name its base model")):
            assert main(program, [*words, "--adapters", str(folder)]) == 2
            printed = capsys.readouterr().err
            assert str(folder) in printed
            assert why in printed
            assert "its base model" in printed
    assert main("swift", ["infer", "--adapters", str(gone), "--model", str(dense)]) == 0
    assert f"--adapters {gone}: made for another model, {tmp_path / 'gone'}. It is applied to --model {dense}." in (
        capsys.readouterr().err
    )


def test_an_adapter_of_another_model(adapter: Path, dense: Path, tmp_path: Path) -> None:
    wide = write_model(tmp_path / "wide", DENSE | {"intermediate_size": 128})
    assert refusal(f"{LORA} --adapters {adapter}", wide) == (
        f"--adapters {adapter}: made for another model, {dense}, with intermediate_size 96, and --model {wide} has "
        f"128. Set --model {dense}, or another adapter."
    )
    alike = write_model(tmp_path / "alike", DENSE)
    _, _, (note,) = check(f"{LORA} --adapters {adapter}", alike)
    assert note == f"--adapters {adapter}: made for another model, {dense}. It is applied to --model {alike}."
    again = write_model(tmp_path / "again", {name: size for name, size in DENSE.items() if name != "head_dim"})
    _, _, (note,) = check(f"{LORA} --adapters {adapter}", again)  # a config.json that leaves it to be worked out
    assert note.endswith(f"It is applied to --model {again}.")
    (tmp_path / "elsewhere").mkdir()
    moved = write_model(tmp_path / "elsewhere" / "dense", DENSE)  # a copy under the same name
    assert check(f"{LORA} --adapters {adapter}", moved)[2] == []
    mixture = write_adapter(tmp_path / "other", "owner/mixture", target_modules=["q_a_proj"])
    said = refusal(f"{LORA} --adapters {mixture}", dense)
    assert said.startswith(f"--adapters {mixture}: --target_modules model.layers.0.self_attn.q_a_proj, ")
    assert "model.layers.2.self_attn.q_a_proj matches no module of this model" in said


def test_adapters_in_megatron_cores_format(dense: Path, adapter: Path, tmp_path: Path) -> None:
    there = mcore(tmp_path / "mcore", None)
    words = f"{LORA} --mcore_adapter {there}"
    assert f"--mcore_adapter {there}: there is no adapter_config.json in it" in refusal(words, dense)
    write_adapter(adapter, dense, target_modules=["model.layers.3.self_attn.q_proj"])  # there each has its whole name
    shutil.copy(adapter / "adapter_config.json", there)
    options, _, _ = check(words, dense)
    assert (options.lora.lora_rank, options.mcore_adapter) == (4, str(there))
    write_adapter(adapter, dense, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    shutil.copy(adapter / "adapter_config.json", there)  # not all of its modules are named
    _, _, (note,) = check(f"{words} --target_modules all-linear", dense)
    expected = f"--target_modules all-linear: the adapter to continue, --mcore_adapter {there}, has its own"
    assert note == f"{expected}, which stay."
    assert f"--mcore_adapter {dense}: no megatron-core" in refusal(f"{LORA} --mcore_adapter {dense}", dense)
    assert f"--mcore_adapter {adapter}: is in PEFT's" in refusal(f"{LORA} --mcore_adapter {adapter}", dense)
    assert "no such folder" in refusal(f"{LORA} --mcore_adapter owner/name", dense)
    assert refusal(f"{LORA} --adapters=", dense).startswith("--adapters: is empty. Set the folder of an adapter")


def test_export_of_adapters(adapter: Path, dense: Path, tmp_path: Path, ran: list, capsys) -> None:
    def said(*words: str | Path) -> str:
        assert main("swift", ["export", *map(str, words)]) == 2
        return capsys.readouterr().err

    base = mcore(tmp_path / "base")
    delta = mcore(tmp_path / "delta", None)
    shutil.copy(adapter / "adapter_config.json", delta)
    given = ("--adapters", adapter)
    assert "error: --to_mcore, --to_hf: missing. Set" in said("--model", dense)
    assert "error: --merge_lora true needs an" in said("--model", dense, "--merge_lora")
    for words in (given, (*given, "--to_hf", "--merge_lora", "false")):
        assert "--merge_lora true" in said(*words)
    assert "only one adapter is supported" in said(*given, dense, "--merge_lora")
    wide = write_model(tmp_path / "wide", DENSE | {"hidden_size": 128})
    assert "with hidden_size 64, and --model" in said(*given, "--merge_lora", "--model", wide)
    assert "it is, contains or lies within" in said(*given, "--merge_lora", "--output_dir", adapter / "merged")

    both = ("--mcore_model", base, "--mcore_adapter", delta, "--to_hf")
    assert "--test_convert_precision true: transformers reads neither side" in said(
        *both, "--merge_lora", "false", "--test_convert_precision"
    )

    out = ("--output_dir", str(tmp_path / "out"))
    for words, merges in (
        ((*given, "--merge_lora"), True),
        ((*given, "--merge_lora", "true", "--to_mcore"), True),
        (both, True),
        ((*both, "--merge_lora", "false"), False),
        (("--adapters", "owner/name", "--merge_lora"), True),
        (("--model", dense, "--to_mcore"), False),
    ):
        assert main("swift", ["export", *map(str, words), *out]) == 0, capsys.readouterr().err
        assert ran[-1].merge_lora is merges
    assert ran[0].model == str(dense)


def test_infer_with_adapters(adapter: Path, dense: Path, ran: list, capsys) -> None:
    assert main("swift", ["infer", "--adapters", str(adapter)]) == 0
    assert ran[-1].model == str(dense)
    assert f"note: --model {dense}: the base model that --adapters {adapter} names.\n" in capsys.readouterr().err
    assert main("swift", ["infer", "--adapters", "owner/name"]) == 0  # the task finds its model
    assert ran[-1].model == ""
    assert main("swift", ["infer", "--model", str(dense), "--merge_lora", "true"]) == 2
    assert "error: --merge_lora true needs an" in capsys.readouterr().err
    assert main("swift", ["infer", "--adapters", str(adapter), "b"]) == 2
    assert "only one adapter is supported" in capsys.readouterr().err


def test_adapters_are_checked_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from megaswift.cli.main import main; code = main('megatron', sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'datasets', 'peft'} & set(sys.modules); sys.exit(code)"
    )
    model = write_model(tmp_path / "model", MIXTURE)
    folder = write_adapter(tmp_path / "adapter", model, lora_dropout=0)
    words = f"sft {LORA} --dataset d --train_iters 1 --adapters {folder} --target_modules linear_proj".split()
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "error: --target_modules linear_proj: the adapter to continue, --adapters" in done.stderr
