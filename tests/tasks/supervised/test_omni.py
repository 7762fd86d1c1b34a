"""`megatron sft` with images and audios in one dataset as a user runs it, and the same steps by transformers."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import prepared, tiny_audio, tiny_omni, tiny_vision
from tests.bridge.families.worker import tensors_of
from tests.tasks.supervised.test_images import ALL, BATCH, EPSILON, LAYOUTS, RATE, STEPS, log, train, write
from tests.templates.media.test_omni import HOP, film, reference, reference_with_sound

pytestmark = pytest.mark.slow
MODELS = ("qwen3_omni_moe", "qwen2_5_omni")
NAMES = "loss", "grad_norm", "images", "visual_tokens", "audios", "audio_tokens"
SPLIT = {name: split for name, split in LAYOUTS.items() if name != "TP2"} | {
    "EP2": ("--expert_model_parallel_size 2", 2),
    "packed": ("--packing true --max_length 512 --global_batch_size 2 --train_iters 1", 1),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("omni")
    for model in MODELS:
        tiny_omni.FAMILIES[model](place / model)
    for number in range(9):
        tiny_vision.picture(30 + 17 * number, 120 - 9 * number, number).save(place / f"{number}.png")
        samples = tiny_audio.sound(160 * (100 + 40 * number), number)
        (place / f"{number}.wav").write_bytes(tiny_audio.wav(samples))
    write(place / "train.jsonl", [row(number) for number in range(STEPS * BATCH)])
    for number in range(3):
        film(place / f"{number}.mov", 9 + 20 * number, HOP * (300 - 110 * number), number)
    write(place / "films.jsonl", [row_with_film(number) for number in range(STEPS * BATCH)])
    return place


def row_with_film(number: int) -> dict[str, Any]:
    """A row with up to one film, beside an image or an audio."""
    example = row(number)
    question, answer = example["messages"]
    films = number % 3 > 0
    question = question | {"content": question["content"].replace("<audio><audio>", "<audio>") + "<video>" * films}
    return example | {
        "messages": [question, answer], "videos": [f"{number % 3}.mov"] * films, "audios": example["audios"][:1],
    }  # fmt: skip


def row(number: int) -> dict[str, Any]:
    """A row with up to one image and up to two audios."""
    images, audios = number % 2, number * 2 % 3
    question = {"role": "user", "content": "<audio>" * audios + "what colour?" + "<image>" * images}
    answer = {"role": "assistant", "content": "a red circle " * (1 + number % 3)}
    files = [f"{(number + i) % 9}.wav" for i in range(audios)]
    return {"messages": [question, answer], "images": [f"{number % 9}.png"] * images, "audios": files}


def inputs_of(processor: Any, example: dict[str, Any], place: Path) -> dict[str, Any]:
    """Inputs of the thinker; videos are heard."""
    files = {kind: [str(place / file) for file in example.get(kind, [])] for kind in ("images", "videos", "audios")}
    if files["videos"]:
        return {**reference_with_sound(processor, example | files), "use_audio_in_video": True}
    return reference(processor, example | files, 2)


def steps_of_transformers(
    place: Path, name: str, data: str = "train"
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of the same steps by transformers, its processor and torch's AdamW."""
    from transformers import AutoModelForMultimodalLM

    processor = tiny_vision.processor_of(place / name)
    thinker: Any = AutoModelForMultimodalLM.from_pretrained(place / name, dtype=torch.float32).thinker
    optimizer = torch.optim.AdamW(thinker.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0)
    header = processor.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    end_id = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = [json.loads(line) for line in (place / f"{data}.jsonl").read_text().splitlines()]
    found = []
    for step in range(STEPS):
        losses, count = [], 0
        for example in rows[step * BATCH : (step + 1) * BATCH]:
            inputs = inputs_of(processor, example, place)
            ids = inputs["input_ids"][0].tolist()
            start = max(i for i in range(len(ids)) if ids[i : i + len(header)] == header) + len(header)
            end = max(i for i, token in enumerate(ids) if token == end_id) + 1
            log_probs = thinker(**inputs).logits[0].log_softmax(-1)
            losses.append(-log_probs[start - 1 : end - 1].gather(1, torch.tensor(ids[start:end])[:, None]).sum())
            count += end - start
        optimizer.zero_grad()
        loss = torch.stack(losses).sum() / count
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in thinker.parameters() if p.grad is not None])
        optimizer.step()
        found.append([loss.item(), norm.item()])
    thinker.save_pretrained(place / f"{name}-expected")
    return found, load_file(place / f"{name}-expected" / "model.safetensors")


@pytest.mark.parametrize("model", [MODELS[0], *(pytest.param(name, marks=pytest.mark.long) for name in MODELS[1:])])
def test_steps_are_those_of_transformers(model, place):
    """Of all parameters of the thinker; those that speak stay as they are, as does the rest of config.json."""
    expected, weights = steps_of_transformers(place, model)
    run = train(place, f"--model {model} {ALL}")
    torch.testing.assert_close(log(run, "loss", "grad_norm"), expected, rtol=1e-4, atol=0)
    folder = run / f"checkpoint-{STEPS}"
    trained, start = tensors_of(folder), tensors_of(place / model)
    assert trained.keys() == start.keys()
    thinking = {name for name in trained if name.startswith("thinker.")}
    assert {name.removeprefix("thinker.") for name in thinking} == weights.keys()
    assert len(thinking) < len(trained)
    for name, tensor in trained.items():
        if name not in thinking:
            assert torch.equal(tensor, start[name]), name
            continue
        after = weights[name.removeprefix("thinker.")]
        moved = (after - start[name]).abs().max()
        rounding = (
            0.1 * RATE if name.endswith(("k_proj.bias", "qkv.bias", "attn.k.bias")) else 1e-6
        )  # a key's exact gradient is 0
        assert (tensor - after).abs().max() < 0.1 * moved + rounding, name
    files = {file.name for file in (place / model).iterdir()} - {"model.safetensors"}
    assert files <= {file.name for file in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text()) == json.loads((place / model / "config.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_steps_on_videos_that_are_heard(model, place, monkeypatch):
    """In one process, and where two ranks share images, videos and audios of a document."""
    expected, _ = steps_of_transformers(place, model, "films")
    monkeypatch.setenv("USE_AUDIO_IN_VIDEO", "true")
    for flags, processes in (("", 1), ("--context_parallel_size 2", 2)):
        run = train(place, f"--model {model} {ALL} {flags}", processes, data="films.jsonl")
        torch.testing.assert_close(log(run, "loss", "grad_norm"), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.long) for name in SPLIT])
def test_a_layout_gives_the_numbers_of_one_process(layout, place):
    flags, processes = SPLIT[layout]
    run = train(place, f"--model {MODELS[0]} {ALL} {flags}", processes)
    same_data = "--global_batch_size 12 --train_iters 1" if layout == "packed" else ""
    alone = train(place, f"--model {MODELS[0]} {ALL} {same_data}")
    torch.testing.assert_close(log(run, *NAMES), log(alone, *NAMES), rtol=1e-4, atol=0)


@pytest.mark.long
@pytest.mark.parametrize(("flags", "adapted"), [("", {"model"}), (ALL, {"model", "visual", "audio_tower"})])
@pytest.mark.parametrize("model", MODELS)
def test_adapters_are_of_the_thinker_alone(model, flags, adapted, place):
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    run = train(place, f"--model {model} --tuner_type lora {flags} --lora_rank 4 --merge_lora true")
    base = AutoModelForMultimodalLM.from_pretrained(place / model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        merged_by_peft = PeftModel.from_pretrained(base, run / f"checkpoint-{STEPS}").merge_and_unload()
    merged_by_peft.save_pretrained(run / "expected")
    merged, expected = tensors_of(run / f"checkpoint-{STEPS}-merged"), tensors_of(run / "expected")
    assert merged.keys() == expected.keys()
    start = tensors_of(place / model)
    moved = {name.split(".")[1] for name in merged if not torch.equal(merged[name], start[name])}
    assert moved == adapted
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_features_from_disk(model, place):
    plain, cached = (train(place, f"--model {model} {flags}") for flags in ("", "--precompute_features true"))
    again = train(place, f"--model {model} --precompute_features true")
    assert log(plain, "loss") == log(cached, "loss") == log(again, "loss")


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_of_megatron_core_and_back(model, place):
    for words in (f"--model {model} --to_mcore true --output_dir {model}-mcore",
                  f"--mcore_model {model}-mcore --to_hf true --output_dir {model}-back"):  # fmt: skip
        command = f"-m megaswift.cli.main swift export {words} --torch_dtype float32 --test_convert_precision true"
        done = prepared.run(command.split(), cwd=place, environment=os.environ | {"HF_HOME": str(place / "cache")})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed" in done.stdout + done.stderr
    before, after = tensors_of(place / model), tensors_of(place / f"{model}-back")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    files = [json.loads((place / folder / "config.json").read_text()) for folder in (model, f"{model}-back")]
    assert files[0] == files[1]
