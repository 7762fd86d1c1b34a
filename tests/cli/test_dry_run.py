"""Errors that a dry run finds as the run would: weights, columns, vocabularies, output folder."""

import json
import re
import shutil
from pathlib import Path

import pytest
from megaswift.cli.flags import flags_of
from megaswift.cli.main import main
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.rewards import orms, reward

from tests.cli.checks.checking import install
from tests.cli.conftest import DENSE, write_model, write_tokenizer


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MODELSCOPE_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "model", DENSE)
    write_tokenizer(folder)
    return folder


def dry(capsys, words: str, *, vllm: bool = False) -> tuple[int, str]:
    """Return the exit code and the output."""
    code = main("megatron", [*words.split(), "--dry_run", "true", "--use_vllm", str(vllm).lower()])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def written(file: Path, *solutions: str | None) -> Path:
    rows = [{"query": f"What is {n}?", "solution": solution} for n, solution in enumerate(solutions)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def grpo(model: Path, data: Path, more: str = "") -> str:
    words = f"rlhf --rlhf_type grpo --model {model} --dataset {data} --global_batch_size 8 --train_iters 1"
    return f"{words} {more}" if "--reward_funcs" in more else f"{words} --reward_funcs accuracy {more}"


def test_weights_that_are_cut_short(model, tmp_path, capsys):
    data = written(tmp_path / "a.jsonl", "1")
    assert dry(capsys, grpo(model, data))[0] == 0
    (model / "model.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{}")
    assert "model.safetensors is not a whole safetensors file" in dry(capsys, grpo(model, data))[1]
    (model / "model.safetensors").unlink()
    code, said = dry(capsys, grpo(model, data))
    assert (code, f"--model {model}: has no weights: no model.safetensors.index.json" in said) == (2, True)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 3}, "which a qwen3 model of this config.json has no place for"),
        ({"num_hidden_layers": 5}, "lacks 11 tensors (model.layers.4."),
        ({"vocab_size": 7}, "model.embed_tokens.weight has shape [259, 64], and by config.json it has [7, 64]"),
        ({"num_key_value_heads": 2}, "k_proj.weight has shape [64, 64], and by config.json it has [32, 64]"),
        ({"hidden_act": "foo"}, "config.json has hidden_act 'foo'"),
    ],
)
def test_weights_of_another_config(model, tmp_path, capsys, changes, problem):
    (model / "config.json").write_text(json.dumps(DENSE | changes))
    code, printed = dry(capsys, grpo(model, written(tmp_path / "a.jsonl", "1")))
    assert (code, problem in printed) == (1, True), printed


def test_an_adapter_of_a_hub_is_not_checked(model, tmp_path, capsys):
    data = written(tmp_path / "a.jsonl", "1")
    code, printed = dry(capsys, grpo(model, data, "--tuner_type lora --adapters owner/name"))
    assert (code, "note: --adapters owner/name: no such folder." in printed) == (0, True), printed


def test_only_what_is_set_is_listed(model, tmp_path, capsys):
    data = written(tmp_path / "a.jsonl", "1")
    said = dry(capsys, grpo(model, data, "--hub_token SECRET"))[1]
    options, _, rest = said.partition("\nData\n")
    first, *lines, last = options.splitlines()
    names = [line.split()[0] for line in lines]
    assert (first, {"model", "dataset", "train_iters", "reward_funcs", "hub_token"} <= {*names}) == ("Options", True)
    assert all(line.endswith(("(command line)", "(derived)")) for line in lines)
    assert "SECRET" not in said
    assert last.endswith(" options at the default: see docs/flags.md, or args.json in the run's folder.")
    assert int(last.split()[0]) + len(names) + 1 == len(flags_of(GrpoOptions))  # the last is --dry_run itself
    assert "global batch      8 = 1 x DP 1 x 8 micro batches" in rest
    assert len(said.splitlines()) < 45


def test_columns_that_rewards_want(model, tmp_path, capsys):
    data, none = written(tmp_path / "a.jsonl", "1", None), written(tmp_path / "b.jsonl", None, None)
    code, said = dry(capsys, grpo(model, data))
    assert (code, "note: --reward_funcs accuracy cannot score 1 of the 2 rows to train on" in said) == (0, True)
    assert "accuracy: it requires the column solution" in dry(capsys, grpo(model, none))[1]
    code, said = dry(capsys, grpo(model, data, f"--val_dataset {none}"))
    assert (code, "cannot score any of the 2 rows to evaluate on, which lack solution" in said) == (1, True)
    assert dry(capsys, grpo(model, none, "--reward_funcs format"))[0] == 0


def test_sources_that_rewards_want(model, tmp_path, capsys):
    data = tmp_path / "a.jsonl"
    rows = [{"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}} for _ in range(2)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = dry(capsys, grpo(model, data, "--reward_funcs by_source"))
    assert (code, "by_source: it requires the column data_source or tag, and the dataset has prompt" in said) == (
        1,
        True,
    )
    rows[0]["tag"] = "math"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = dry(capsys, grpo(model, data, "--reward_funcs by_source"))
    assert (code, "by_source cannot score 1 of the 2 rows to train on, which lack data_source or tag" in said) == (
        0,
        True,
    )
    code, said = dry(capsys, grpo(model, data, "--reward_funcs by_source --judge_server nowhere"))
    assert (code, "error: --judge_server nowhere: not a URL. Set one" in said) == (2, True)


def test_classes_of_rewards_are_not_made(model, tmp_path, capsys):
    @reward("dear")
    class Dear:
        def __init__(self):
            raise AssertionError

        def __call__(self, completions, level):
            return []

    try:
        data = written(tmp_path / "a.jsonl", "1")
        assert "dear: it requires the column level" in dry(capsys, grpo(model, data, "--reward_funcs dear"))[1]
    finally:
        del orms["dear"]


def test_an_output_folder_that_cannot_be_made(model, tmp_path, capsys):
    data, place = written(tmp_path / "a.jsonl", "1"), tmp_path / "new" / "out"
    code, said = dry(capsys, grpo(model, data, "--output_dir /proc/foo"))
    assert (code, "--output_dir /proc/foo: /proc cannot be written" in said) == (2, True)
    before = {*tmp_path.iterdir()}
    assert dry(capsys, grpo(model, data, f"--output_dir {place}"))[0] == 0
    assert {*tmp_path.iterdir()} - {tmp_path / "cache"} == before - {tmp_path / "cache"}


@pytest.mark.parametrize("flag", ["teacher_model", "ref_model", "critic_model"])
def test_another_model(flag, model, tmp_path, capsys):
    data, other = written(tmp_path / "a.jsonl", "1"), tmp_path / "other"
    shutil.copytree(model, other)
    words = grpo(model, data, f"--{flag} {other}")
    if flag == "teacher_model":
        words = words.replace("grpo", "gkd").replace("--reward_funcs accuracy", "")
    if flag == "critic_model":
        words = words.replace("grpo", "ppo")
    assert dry(capsys, words)[0] == 0
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert f"--{flag} {other} has another vocabulary than the trained model" in dry(capsys, words)[1]
    (other / "model.safetensors").unlink()
    assert f"--{flag} {other}: has no weights" in dry(capsys, words)[1]


def test_the_share_of_vllm_in_the_processes(model, tmp_path, capsys, monkeypatch):
    install(monkeypatch, vllm=True)
    words = grpo(model, written(tmp_path / "a.jsonl", "1", "2"), "--torch_dtype bfloat16 --max_length 64")
    code, said = dry(capsys, f"{words} --vllm_mode colocate", vllm=True)
    assert code == 0, said
    assert re.search(r"memory +\d.* tokens, in training: weights", said), said
    assert re.search(
        r"generation +by vLLM with 0\.\d\d of the GPU, (by turns with|beside) training, by the plan, on NVIDIA", said
    )
    assert "  generation " not in dry(capsys, f"{words} --vllm_mode colocate --sleep_level 0", vllm=True)[1]
    assert "  generation " not in dry(capsys, words)[1]
