"""Checks of the forms of an export: what goes in, what comes out, merged or not."""

import shutil
from pathlib import Path

import pytest
from megaswift.cli import main as cli
from megaswift.cli.main import main
from megaswift.tasks.run.planning import export_folder, is_upload_only

from tests.cli.checks.test_export import mcore, message
from tests.cli.checks.test_lora import write_adapter
from tests.cli.conftest import DENSE, write_model


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return the options of the runs after the checks."""
    ran: list = []
    monkeypatch.setattr(cli, "_run", lambda command, options, sources: ran.append(options) or 0)
    return ran


def test_forms_of_an_adapters_export(tmp_path: Path, capsys, ran: list) -> None:
    dense = write_model(tmp_path / "dense", DENSE)
    peft, there, base = write_adapter(tmp_path / "peft", dense), mcore(tmp_path / "there", None), mcore(tmp_path / "m")
    shutil.copy(peft / "adapter_config.json", there)
    adapters, mcore_adapter, model = ("--adapters", peft), ("--mcore_adapter", there), ("--model", dense)
    for number, (words, merges) in enumerate([
        ((*model, *mcore_adapter, "--merge_lora", "false", "--to_hf", "true"), False),
        ((*model, *adapters, "--merge_lora", "false", "--to_mcore", "true"), False),
        ((*model, *mcore_adapter, "--merge_lora", "true", "--to_mcore", "true"), True),
        ((*model, *adapters, "--merge_lora", "true", "--to_hf", "true"), True),
        ((*adapters, "--to_hf"), True),
        ((*adapters, "--to_mcore"), False),
        ((*mcore_adapter, "--to_hf"), True),
        ((*mcore_adapter, "--merge_lora"), True),
        (("--mcore_model", base, *adapters, "--merge_lora", "--to_mcore"), True),
        (("--mcore_model", base, *mcore_adapter, "--merge_lora", "false", "--to_hf"), False),
        ((*model, "--to_hf", "--torch_dtype", "bfloat16"), False),
    ]):  # fmt: skip
        assert main("swift", ["export", *map(str, words)]) == 0, (number, capsys.readouterr().err)
        assert ran[-1].merge_lora == merges
        assert ran[-1].model == ("" if "--mcore_model" in words else str(dense))
    for words, reason in (
        ((*mcore_adapter, "--to_mcore", "--merge_lora", "false"), f"{there}: is in megatron-core's format already"),
        ((*adapters, "--to_hf", "--merge_lora", "false"), f"{peft}: is in PEFT's format already. Set --merge_lora"),
        (("--mcore_model", base, *mcore_adapter, "--merge_lora"), "--to_mcore, --to_hf: missing"),
        (("--mcore_model", base, *adapters, "--to_mcore", "--test_convert_precision"), "transformers reads neither"),
    ):
        assert reason in message(capsys, "swift", *words)


def test_fp8(tmp_path: Path, capsys, ran: list) -> None:
    dense = write_model(tmp_path / "dense", DENSE)
    peft = write_adapter(tmp_path / "peft", dense)
    fp8 = ("--quant_method", "fp8")
    ms_swift = ("--to_hf", "true", "--fp8_recipe", "blockwise", "--fp8_format", "e4m3", "--fp8_param_gather", "true")
    for program, words in (("swift", fp8), ("swift", (*fp8, "--quant_bits", "8")), ("megatron", ms_swift)):
        assert main(program, ["export", "--model", str(dense), *words]) == 0, capsys.readouterr().err
        assert (ran[-1].quant_method, ran[-1].to_hf) == ("fp8", True)
        assert export_folder(ran[-1]) == tmp_path / "dense-fp8"
    assert main("swift", ["export", "--adapters", str(peft), *fp8]) == 0
    assert export_folder(ran[-1]) == tmp_path / "peft-merged-fp8"
    for program, words, reason in (
        ("swift", (*fp8, "--to_mcore"), "--quant_method fp8 is for Hugging Face folders"),
        ("swift", (*fp8, "--test_convert_precision"), "--test_convert_precision true cannot be used with --quant_m"),
        ("swift", (*fp8, "--adapters", peft, "--merge_lora", "false"), "is in PEFT's format already"),
        ("megatron", ms_swift[:-2], "--fp8_format e4m3: an export computes nothing in FP8. Set --fp8_param_gather tr"),
        ("swift", ("--quant_method", "awq", "--quant_bits", "8"), "no support for AWQ"),
        ("swift", ("--quant_method", "gptq"), "pip install llmcompressor"),
        ("swift", ("--quant_method", "bnb"), "Set --quant_method fp8, or give transformers' BitsAndBytesConfig"),
        ("swift", (*fp8, "--quant_bits", "4"), "--quant_bits 4"),
    ):
        assert reason in message(capsys, program, "--model", dense, *words)


def test_uploads(tmp_path: Path, capsys, ran: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no login
    monkeypatch.delenv("HF_TOKEN", raising=False)
    dense = write_model(tmp_path / "dense", DENSE)
    push = ("--push_to_hub", "true", "--hub_model_id", "me/model", "--use_hf", "true", "--hub_token", "t")
    for words in ((), ("--to_mcore",)):  # the folder as it is, and what is exported
        assert main("swift", ["export", "--model", str(dense), *words, *push]) == 0, capsys.readouterr().err
        assert is_upload_only(ran[-1]) == (not words)
    assert main("swift", ["export", "--model", str(dense), "--to_mcore", "--hub_model_id", "me/model"]) == 0
    assert "--hub_model_id me/model has no effect: there is no --push_to_hub true." in capsys.readouterr().err
    for words, reason in (
        (push[:2], "--push_to_hub true needs the repository to upload to. Set --hub_model_id OWNER/NAME."),
        (push[:6], "needs a token that may write. Set --hub_token, HF_TOKEN, or `hf auth login`"),
        (
            push[:4],
            "needs the package modelscope. Set --use_hf true to upload to Hugging Face, or `pip inst",
        ),
        *(
            ((*push, "--hub_model_id", name), f"--hub_model_id {name}: not the name of a repository. Set OWNER/NAME.")
            for name in ("a/b/c", "a/..", "a b", "/tmp/x", "a/")
        ),
        ((*push, "--use_hf", "false", "--hub_model_id", "model"), "--hub_model_id model: not the name of a"),
        ((*push, "--model", tmp_path / "gone"), "gone is no folder"),
    ):
        assert reason in message(capsys, "swift", *(() if "gone" in str(words) else ("--model", dense)), *words)
