"""What loading and saving in two processes reads, writes and tells a user."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from megaswift.bridge.checkpoint import conversion_report
from safetensors.torch import load_file
from xxhash import xxh3_128

from tests.bridge.checkpoint import models
from tests.torchrun import torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder with all the models, and what the worker made of them."""
    root = tmp_path_factory.mktemp("models")
    for name in models.MODELS:
        models.save(root, name)
    run = torchrun("tests.bridge.checkpoint.round_trip_worker", root, processes=2)
    assert run.returncode == 0, run.stderr[-5000:]
    return root


def test_reading_and_failures(folder):
    results = json.loads((folder / "results.json").read_text())
    assert 0.5 <= results["share read"] < 0.51  # half of all but the norms
    assert "the checkpoint could not be written: rank 1: [Errno 28] No space left" in results["full disk"]
    assert "model.safetensors: model.layers.2.mlp.down_proj.weight has shape [80, 48]" in results["wrong shape"]
    assert "by config.json it has [48, 80]" in results["wrong shape"]


@pytest.mark.parametrize("name", models.MODELS)
def test_transformers_takes_what_was_saved(name, folder):
    from transformers import AutoModelForCausalLM

    source, saved = folder / name, folder / f"{name} saved"
    _, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values()), info
    config, config_saved = (json.loads((path / "config.json").read_text()) for path in (source, saved))
    assert config_saved == config | {"dtype": "bfloat16"}
    small = ("tokenizer.json", "chat_template.jinja", "generation_config.json", "additional_chat_templates/tools.jinja")
    for file in small:
        assert (saved / file).read_bytes() == (source / file).read_bytes()
    shards = sorted(path.name for path in saved.glob("*.safetensors"))
    count = len(shards)
    assert shards == [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    others = {path.name for path in saved.iterdir()} - set(shards)
    assert others == {
        "additional_chat_templates",
        "config.json",
        "conversion.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    }


@pytest.mark.parametrize("name", models.MODELS)
def test_every_conversion_is_proven(name, folder):
    """The checksums are those of the bytes in the files, by a reader that is not ours."""
    saved = folder / f"{name} saved"
    record = json.loads((saved / "conversion.json").read_text())
    found = {}
    for file in saved.glob("*.safetensors"):
        for tensor, value in load_file(file).items():
            data = value.flatten().view(torch.uint8).numpy().tobytes()
            found[tensor] = (file.name, list(value.shape), xxh3_128(data).hexdigest())
    said = {tensor: (about["file"], about["shape"], about["xxh3_128"]) for tensor, about in record["tensors"].items()}
    assert said == found
    assert record["bytes"] == sum(2 * math.prod(shape) for _, shape, _ in found.values())
    assert record["seconds"] > 0
    assert len(record["peak_memory_bytes"]) == 2
    assert record["unused"] == record["missing"] == []
    about = record["tensors"]["model.layers.2.self_attn.k_proj.weight"]
    assert (about["mcore"], about["part"]) == ("decoder.layers.2.self_attention.linear_qkv.weight", "k")
    if name == "qwen3_moe":
        about = record["tensors"]["model.layers.3.mlp.experts.5.up_proj.weight"]
        assert (about["layer"], about["expert"], about["part"]) == (3, 5, "up")


def test_a_changed_byte_is_found(folder, tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(folder / f"{models.MODELS[0]} saved", saved)
    assert conversion_report.differences(saved) == []
    file = sorted(saved.glob("*.safetensors"))[3]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (changed,) = conversion_report.differences(saved)
    assert changed.endswith("has other bytes than were written")
    (saved / "conversion.json").unlink()
    with pytest.raises(ValueError, match=r"has no conversion.json"):
        conversion_report.differences(saved)
