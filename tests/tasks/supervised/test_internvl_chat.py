"""The same InternVL under the names of InternVLChatModel and of transformers: runs, checkpoints and answers agree.

Of the second, other tests compare all with transformers. The names are those of `tests.internvl_chat`.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from megaswift.bridge.checkpoint.pretrained import load_model
from safetensors.torch import load_file

from tests import internvl_chat, prepared, tiny_vision
from tests.tasks.supervised.test_images import ALL, log, megatron, row, train, write

pytestmark = pytest.mark.slow
LORA = "--tuner_type lora --lora_rank 4"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("internvl")
    usual = tiny_vision.internvl(place / "usual")
    internvl_chat.set_statistics(usual)
    shutil.copytree(usual, place / "chat")
    internvl_chat.rename(place / "chat", most_tiles=6)
    for number in range(9):
        tiny_vision.picture(30 + 17 * number, 120 - 9 * number, number).save(place / f"{number}.png")
    write(place / "train.jsonl", [row(number) for number in range(12)])
    return place


@pytest.fixture(scope="module")
def runs(place: Path) -> dict[str, Path]:
    return {name: train(place, f"--model {name} {ALL}") for name in ("usual", "chat")}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoint-3" / "model.safetensors")


def test_training(runs: dict[str, Path], place: Path) -> None:
    names = "loss", "grad_norm"
    assert log(runs["chat"], *names) == log(runs["usual"], *names)
    saved, expected = weights(runs["chat"]), internvl_chat.chat_names(weights(runs["usual"]))
    before = load_file(place / "chat" / "model.safetensors")
    assert saved.keys() == expected.keys() == before.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert not any(torch.equal(saved[name], before[name]) for name in saved if name.endswith("weight"))


def test_settings_and_code_are_kept(runs: dict[str, Path], place: Path) -> None:
    checkpoint = runs["chat"] / "checkpoint-3"
    assert (checkpoint / "config.json").read_bytes() == (place / "chat" / "config.json").read_bytes()
    assert (checkpoint / "configuration_internvl_chat.py").is_file()


def test_layout(runs: dict[str, Path], place: Path) -> None:
    """In two processes, saved by way of megatron-core's format."""
    run = train(place, f"--model chat {ALL} --tensor_model_parallel_size 2 --sequence_parallel true", 2)
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, weights(runs["chat"])[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["CausalLM", ""], ids=["with its output layer", "without"])
def test_transformers_has_the_weights(kind: str, place: Path) -> None:
    """Reward models are read without the output layer."""
    model, expected = (load_model(place / name, kind).state_dict() for name in ("chat", "usual"))
    assert model.keys() == expected.keys()
    assert all(torch.equal(model[name], expected[name]) for name in model)


def test_answers(runs: dict[str, Path], place: Path) -> None:
    by_name = {name: answers(place, f"--model {run / 'checkpoint-3'}") for name, run in runs.items()}
    assert by_name["chat"] == by_name["usual"]
    assert any(by_name["chat"])


def test_adapters(place: Path) -> None:
    """Of tower and language model: their modules are those of the checkpoint, and transformers has others."""
    run = train(place, f"--model chat {LORA} --freeze_vit false --freeze_aligner false")
    adapter = run / "checkpoint-3"
    weights = load_file(place / "chat" / "model.safetensors")
    modules = {
        name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        for name in load_file(adapter / "adapter_model.safetensors")
    }
    assert modules >= {"vision_model.encoder.layers.0.attn.qkv", "mlp1.1", "mlp1.3"}
    assert not [module for module in modules if f"{module}.weight" not in weights]
    further = train(place, f"--adapters {adapter} --tuner_type lora --freeze_vit false --freeze_aligner false")
    assert load_file(further / "checkpoint-3" / "adapter_model.safetensors").keys() == set(
        load_file(adapter / "adapter_model.safetensors")
    )
    said = infer(place, f"--model chat --adapters {adapter}", code=1)
    assert "has adapters of the vision tower, whose layers are others" in said
    megatron(place, f"export --model chat --adapters {adapter} --merge_lora true --to_hf true --save merged")
    merged = load_file(place / "merged" / "model.safetensors")
    assert merged.keys() == weights.keys()
    changed = {name.removesuffix(".weight") for name in merged if not torch.equal(merged[name], weights[name])}
    assert changed == modules


def test_names_without_files_to_read_them_from(runs: dict[str, Path], place: Path) -> None:
    """A megatron-core checkpoint that another tool wrote does not say its names."""
    megatron(place, f"export --model {runs['chat'] / 'checkpoint-3'} --to_mcore true --save mcore")
    (place / "mcore" / "conversion.json").unlink()
    megatron(place, "export --mcore_model mcore --to_hf true --save back")
    saved, expected = load_file(place / "back" / "model.safetensors"), weights(runs["chat"])
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


def test_adapters_of_the_language_model(place: Path) -> None:
    adapter = train(place, f"--model chat {LORA}") / "checkpoint-3"
    megatron(place, f"export --model chat --adapters {adapter} --merge_lora true --to_hf true --save merged-text")
    assert answers(place, "--model merged-text") == answers(place, f"--model chat --adapters {adapter}")


def answers(place: Path, flags: str) -> list[str]:
    infer(place, flags)
    return [json.loads(line)["response"] for line in (place / "answers.jsonl").read_text().splitlines()]


def infer(place: Path, flags: str, *, code: int = 0) -> str:
    """Return what `swift infer` prints; it writes answers to three rows."""
    result = place / "answers.jsonl"
    result.unlink(missing_ok=True)
    words = f"infer --val_dataset train.jsonl#3 --max_new_tokens 5 --temperature 0 --result_path {result} {flags}"
    done = prepared.run(["-m", "megaswift.cli.main", "swift", *words.split()], cwd=place)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
