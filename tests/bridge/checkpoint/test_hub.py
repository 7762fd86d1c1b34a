"""Where `--model` comes from: a folder, Hugging Face, ModelScope. The hubs are fakes of their packages' functions."""

import json
import math
import sys
import types
from fnmatch import fnmatch

import pytest
from megaswift.bridge.checkpoint.hub import (
    adapter_folder,
    model_folder,
    read_adapter_config,
    read_config,
    set_base_model,
)
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.bridge.options import ModelOptions
from megaswift.tasks.options import ExportOptions


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What a fake snapshot_download was called with; it gives `tmp_path`."""
    calls = {}

    def download(name, **given):
        calls.update(name=name, **given)
        return str(tmp_path)

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    calls["modelscope"] = types.SimpleNamespace(snapshot_download=download, __spec__=object())
    return calls


def test_a_config_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is nested too deeply: copy it again"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"adapter_config\.json is nested too deeply: copy the adapter again"):
        read_adapter_config(tmp_path, mcore=True)


def test_a_folder_is_itself(tmp_path):
    assert model_folder(ModelOptions(model=str(tmp_path))) == tmp_path


def test_hugging_face(asked, tmp_path):
    options = ModelOptions(model="Qwen/Qwen3-0.6B", use_hf=True, model_revision="main", hub_token="secret")
    assert model_folder(options) == tmp_path
    assert (asked["name"], asked["revision"], asked["token"]) == ("Qwen/Qwen3-0.6B", "main", "secret")
    ignored = asked["ignore_patterns"]
    assert "*.safetensors" not in ignored
    of_torch = dict.fromkeys(("model.pt", "checkpoint.pt", "optimizer.pt", "pytorch_model.bin"), False)
    names = {"model-00001-of-00003.safetensors": True, "consolidated.safetensors": False, "spk_dict.pt": True}
    for file, taken in (names | of_torch).items():
        assert any(fnmatch(file, pattern) for pattern in ignored) != taken
    model_folder(options, weights=False)
    assert "*.safetensors" in asked["ignore_patterns"]


def test_of_an_adapter_only_its_own_files_are_fetched(asked, tmp_path):
    options = ModelOptions(model="Qwen/Qwen3-0.6B", use_hf=True, model_revision="v2", hub_token="secret")
    assert adapter_folder(options, ["someone/adapter"]) == tmp_path
    wanted = {"adapter_config.json", "adapter_model.safetensors"}
    assert asked["name"] == "someone/adapter"
    assert asked["token"] == "secret"
    assert set(asked["allow_patterns"]) == wanted
    assert "revision" not in asked  # that of the model
    assert adapter_folder(options, [str(tmp_path)]) == tmp_path
    assert adapter_folder(options, []) is None
    with pytest.raises(ValueError, match=r"--adapters a/b c/d: only one adapter"):
        adapter_folder(options, ["a/b", "c/d"])
    with pytest.raises(FileNotFoundError, match=r"--adapters \./nowhere: no such folder"):
        adapter_folder(options, ["./nowhere"])


def test_an_adapter_names_its_model(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    assert set_base_model(ModelOptions(use_hf=True), tmp_path) == ModelOptions(model="owner/base", use_hf=True)
    for options in (ModelOptions(model="own"), ExportOptions(mcore_model="own")):
        assert set_base_model(options, tmp_path) is options
    assert set_base_model(ModelOptions(), None) == ModelOptions()


def test_modelscope(asked, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", asked["modelscope"])
    assert model_folder(ModelOptions(model="Qwen/Qwen3-0.6B")) == tmp_path
    assert asked["name"] == "Qwen/Qwen3-0.6B"


def test_without_modelscope_both_ways_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"--use_hf true .* `pip install modelscope`"):
        model_folder(ModelOptions(model="Qwen/Qwen3-0.6B"))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "nowhere", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id(name):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        model_folder(ModelOptions(model=name, use_hf=True))


def test_config_that_is_missing_or_broken(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"it has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not valid JSON .* copy it again"):
        read_config(tmp_path)
    for text, fault in (
        ("[]", "is not a JSON object"),
        ('{"text_config": [1]}', r"has text_config \[1\], which must be an object"),
        ('{"vocab_size": "x"}', "has vocab_size 'x', which must be a whole number above 0"),
        ('{"rms_norm_eps": NaN}', "has rms_norm_eps nan, which must be a finite number"),
        ('{"text_config": {"num_attention_heads": 0}}', "has num_attention_heads 0, which must be a whole number"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json {fault}.*\. Fix it, or use the file of the original"):
            read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "fault"),
    [({"r": 0}, "has r 0,"), ({"r": "two"}, "has r 'two',"), ({"lora_alpha": math.nan}, "has lora_alpha nan,")],
)
def test_numbers_of_an_adapter(config, fault, tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"adapter_config\.json {fault} which must be a number above 0"):
        read_adapter_config(tmp_path)


def test_a_hub_that_does_not_answer(monkeypatch):
    import huggingface_hub

    def download(*_, **__):
        raise RuntimeError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(OSError, match=r"--model o/n: cannot be downloaded from Hugging Face \(no network\)\. Check"):
        model_folder(ModelOptions(model="o/n", use_hf=True))


def test_the_folder_of_a_run_names_its_checkpoint(tmp_path):
    checkpoint = tmp_path / "v0" / "checkpoint-7"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"Is it .*v0/checkpoint-7 that you mean"):
        read_config(tmp_path)


def test_tokenizer_that_is_missing_or_broken(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer there: copy tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"its tokenizer cannot be read .* copy its files again"):
        load_tokenizer(tmp_path)
