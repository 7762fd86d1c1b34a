"""`megatron run` and `megatron convert`: words, files, overrides and errors, whatever the dialect."""

from pathlib import Path

import pytest
import yaml
from megaswift.cli.dialects.keys import Keys, read_tree
from megaswift.cli.dialects.run import recognise
from megaswift.cli.dialects.run_words import read_words
from megaswift.cli.dialects.table import (
    computed,
    needless,
    noted,
    only,
    refused,
    same,
    valued,
)
from megaswift.cli.dialects.translation import Default, Dialect, Translation, check, translate
from megaswift.cli.flags import UsageError
from megaswift.cli.main import main


def compute(keys: Keys, translation: Translation) -> None:
    translation.set("rlhf_type", "grpo", "the test")
    batch = keys.integer("batch", 2) * keys.integer("model.n", 8)
    translation.set("global_batch_size", batch, f"{keys.source('batch')} x model.n")


DIALECT = Dialect(
    "test",
    (
        same("model.path", "model"),
        computed("batch", "global_batch_size", text="batch x model.n"),
        computed("model.n", "global_batch_size", text="batch x model.n"),
        valued("decay", "lr_decay_style", {"none": "constant"}),
        needless("bridge", "weights are read from Hugging Face folders"),
        only("engine", "vllm", fix="Set vllm"),
        only("tools", fix="Write a scheduler"),
        noted("offload", "the model stays on the GPU", False),
        refused("rollout.**", "no agents. Remove it"),
        same("tasks[].name", "dataset"),
    ),
    compute,
    {"weight_decay": Default(0.01, "optim.decay")},
)


def translated(*words: str) -> Translation:
    tree, problems = read_tree(None, list(words))
    assert problems == []
    return translate(DIALECT, Keys(tree, "f.yaml"))


def test_each_kind_of_row() -> None:
    translation = translated(
        "model.path=m", "model.n=3", "decay=none", "bridge=true", "engine=vllm", "offload=true", "tasks=[{name: a}]"
    )
    assert translation.flags == {
        "rlhf_type": "grpo", "global_batch_size": 6, "model": "m", "lr_decay_style": "constant", "dataset": "a",
        "weight_decay": 0.01,
    }  # fmt: skip
    assert translation.sources["model"] == "f.yaml: model.path"
    assert translation.sources["weight_decay"] == "test's default of optim.decay"
    assert translation.notes == ["offload true: the model stays on the GPU."]
    assert list(translation.needless) == ["bridge", "engine"]
    assert translation.refused == []


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("model.pth=m", "model.pth m: no such key. The nearest is model.path"),
        ("modle.path=m", "modle.path m: no such key. The nearest is model.path"),
        ("unlike=1", "unlike 1: no such key. Remove it"),
        ("decay=cosine", "decay cosine: choose one of none"),
        ("engine=sglang", "engine sglang: only vllm is supported. Set vllm"),
        ("tools=x", "tools x: is not supported. Write a scheduler"),
        (f"unlike={'y ' * 99}", f"unlike {'y ' * 50}...: no such key. Remove it"),
        ("rollout.agent.name=x", "rollout.agent.name x: no agents. Remove it"),
        ("batch=many", "batch many: a whole number is needed"),
        ("model.n=true", "model.n true: a whole number is needed"),
    ],
)
def test_a_refused_key(word: str, error: str) -> None:
    translation = translated(word)
    assert translation.refused == [error]
    with pytest.raises(UsageError, match="1 key of this test config cannot be followed"):
        check(translation)


def test_every_refused_key_is_in_one_error() -> None:
    assert len(translated("model.pth=m", "engine=sglang", "batch=many", "x=1").refused) == 4


def test_two_keys_that_contradict_each_other() -> None:
    translation = translated("tasks=[{name: a}, {name: b}]")
    assert translation.refused == [
        "--dataset: f.yaml: tasks[1].name asks for b, but f.yaml: tasks[0].name for a. Remove one of them"
    ]


def test_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "7")
    file = tmp_path / "a.yaml"
    file.write_text("lr: 1e-6\nsize: ${oc.env:SIZE}\nother: ${oc.env:UNSET,9}\nb: {c: 1, d: 2}\n")
    tree, problems = read_tree(str(file), ["b.c=5", "+b.e=1e-3", "++b.f=[x,y]", "~b.d", "text='a b'"])
    assert problems == []
    assert tree["lr"] == 1e-6
    assert (str(tree["size"]), str(tree["other"])) == ("7", "9")
    assert tree["b"] == {"c": 5, "e": 1e-3, "f": ["x", "y"]}


def test_interpolations_that_lead_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: ${b.c}\nd:\n  e: ${f}\n  g: ???\nh: 1\n")
    tree, problems = read_tree(str(file), [])
    assert tree == {"d": {}, "h": 1}
    assert problems == [
        "a ${b.c}: leads to no value. Set it: a=VALUE",
        "d.e ${f}: leads to no value. Set it: d.e=VALUE",
        "d.g ???: has no value. Set it: d.g=VALUE",
    ]


@pytest.mark.parametrize("word", ["a.b", "~a.b=1", "=1", "~"])
def test_words_that_are_no_override(word: str) -> None:
    with pytest.raises(UsageError, match="not an override"):
        read_tree(None, [word])


def test_words_by_kind() -> None:
    words = read_words(["a.yaml", "b.c=1", "~d", "--lr", "1e-5", "--dataset", "x=y.jsonl", "z", "--e.f", "2", "g=3"])
    assert (words.file, words.module) == ("a.yaml", None)
    assert words.overrides == ["b.c=1", "~d", "e.f=2", "g=3"]
    assert words.flags == ["--lr", "1e-5", "--dataset", "x=y.jsonl", "z"]
    assert read_words(["siirl.main_dag", "a=1"]).module == "siirl.main_dag"
    with pytest.raises(UsageError, match="name a config file"):
        read_words(["a=1"])


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("actor_rollout_ref: {model: {path: m}}", "verl"),
        ("buffer: {}\nexplorer: {}", "trinity"),
        ("buffer: {}\ncluster: {}", "trinity"),
        ("actor_train: {strategy_args: {}}", "roll"),
        ("training: {trainer_type: TRL_GRPO}", "oumi"),
        ("lr: 1\nmodel: m\nENV: {A: 1}", None),
    ],
)
def test_dialects_are_recognised_by_root_keys(text: str, dialect: str | None) -> None:
    assert recognise(yaml.safe_load(text), "f") == dialect


def test_another_command_names_the_one_for_a_dialect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("buffer: {batch_size: 2}\nexplorer: {}\n")
    assert main("megatron", ["rlhf", str(file)]) == 2
    assert f"--config {file}: is a config of trinity. Run it with megatron run {file}." in capsys.readouterr().err
    file.write_text("")
    assert main("megatron", ["run", str(file)]) == 2
    assert f"{file}: is empty. Fix the path." in capsys.readouterr().err


def test_a_config_that_fits_none_or_two() -> None:
    with pytest.raises(UsageError, match="f: not a config of a known system"):
        recognise({"trainer": {}}, "f")
    with pytest.raises(UsageError, match="f: has the keys of verl and oumi"):
        recognise({"actor_rollout_ref": {}, "training": {"trainer_type": "x"}}, "f")
