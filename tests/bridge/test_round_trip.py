"""Loading and saving in real process groups, against transformers and the checkpoint's own bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bridge import models

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder with all the models."""
    root = tmp_path_factory.mktemp("models")
    for name in models.MODELS:
        models.save(root, name)
    return root


def launch(folder: Path, processes: int) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run = subprocess.run(
        [*command, "-m", "tests.bridge.round_trip_worker", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads((folder / f"results-{processes}.json").read_text())


def differing(results: dict) -> dict[str, str]:
    assert len(results["problems"]) >= len(models.MODELS)
    return {case: problem for case, problem in results["problems"].items() if problem}


@pytest.mark.slow
def test_one_process(folder):
    results = launch(folder, 1)
    assert not differing(results)
    for case, distance in results["distances"].items():
        if case.startswith("fault: "):
            assert distance > 1e-2, case
        else:
            assert distance < 1e-5, case
    assert "model.safetensors: model.layers.2.mlp.down_proj.weight has shape [80, 48]" in results["wrong shape"]
    assert "by config.json it has [48, 80]" in results["wrong shape"]


@pytest.mark.slow
def test_two_processes(folder):
    results = launch(folder, 2)
    assert not differing(results)
    assert 0.5 <= results["share read"] < 0.51  # half of all but the norms
    assert "the checkpoint could not be written: rank 1: [Errno 28] No space left" in results["full disk"]


@pytest.mark.slow
def test_four_processes_then_transformers(folder):
    """Every layout of four, and what they saved last (TP2 PP2) is a model folder that transformers takes."""
    assert not differing(launch(folder, 4))
    from transformers import AutoModelForCausalLM

    for number, name in enumerate(models.MODELS):
        source, saved = folder / name, folder / f"{name} saved by 4"
        _, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(info.values()), (name, info)
        config, config_saved = (json.loads((path / "config.json").read_text()) for path in (source, saved))
        dtype = ("float32", "bfloat16")[number % 2]
        assert config_saved == config | {"dtype": dtype}
        for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            assert (saved / file).read_bytes() == (source / file).read_bytes()
        shards = sorted(path.name for path in saved.glob("*.safetensors"))
        count = len(shards)
        assert shards == [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        index = json.loads((saved / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == shards
        others = {path.name for path in saved.iterdir()} - set(shards)
        assert others == {
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "model.safetensors.index.json",
        }
