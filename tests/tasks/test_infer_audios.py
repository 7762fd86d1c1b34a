"""`swift infer` with audios, beside transformers' own processor and generate."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megaswift.tasks import infer
from megaswift.tasks.options import InferOptions
from megaswift.templates.dataset.transformers_inputs import transformers_inputs
from megaswift.templates.formats.medium import Medium
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import MediaOptions

from tests import tiny, tiny_audio, tiny_vision

pytestmark = pytest.mark.slow
NEW_TOKENS = 10
LENGTHS = 4000, 23_000, 41_000, 16_000  # samples: parts of a second, and some seconds with an unfinished one


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_audio.qwen3_asr(tmp_path_factory.mktemp("qwen3_asr"))


@pytest.fixture(scope="module")
def sounds(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("sounds")
    for number, length in enumerate(LENGTHS):
        (folder / f"{number}.wav").write_bytes(tiny_audio.wav(tiny_audio.sound(length, number)))
    return [str(folder / f"{number}.wav") for number in range(len(LENGTHS))]


def rows_of(sounds: list[str]) -> list[dict[str, Any]]:
    block = {"type": "audio_url", "audio_url": {"url": sounds[2]}}
    return [
        {"query": "what is the sky?"},
        {"query": "<audio>what is it?", "response": "a bird", "audios": sounds[:1]},
        {"query": "<audio>what colour?", "audios": sounds[1:2]},
        {"messages": [{"role": "user", "content": [block, {"type": "text", "text": "what is it?"}]}]},
        {"query": f"say <audio>{sounds[3]}</audio> again"},
    ]


def samples_of(number: int) -> np.ndarray:
    """The samples in a file: float32 [samples]."""
    return (np.round(tiny_audio.sound(LENGTHS[number], number) * 32768).clip(-32768, 32767) / 32768).astype(np.float32)


def expected(folder: Path, parts: list[str | int], adapter: Path | None = None) -> str:
    """The answer of transformers to one prompt. parts: texts, and the number of a sound"""
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    network: Any = AutoModelForMultimodalLM.from_pretrained(folder).eval()
    network = PeftModel.from_pretrained(network, adapter) if adapter else network
    blocks = [{"type": "audio"} if isinstance(part, int) else {"type": "text", "text": part} for part in parts]
    text = processor.apply_chat_template(
        [{"role": "user", "content": blocks}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor.tokenizer([text], return_tensors="pt")
    for number in (part for part in parts if isinstance(part, int)):
        inputs = processor(text=[text], audio=[samples_of(number)])
    end = processor.tokenizer.eos_token_id
    output = network.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=end, pad_token_id=end)
    return processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


PARTS: list[list[str | int]] = [["what is the sky?"], [0, "what is it?"], [1, "what colour?"], [2, "what is it?"]]
PARTS += [["say ", 3, " again"]]


def ask(folder: Path, rows: list[dict[str, Any]], tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    data, path = tmp_path / "data.jsonl", tmp_path / "result.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.unlink(missing_ok=True)
    settings = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "max_batch_size": 5, "result_path": str(path)}
    infer.run(InferOptions(**{"model": str(folder), "val_dataset": [str(data)], **settings, **options}))
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def test_a_batch_answers_as_transformers_does_one_by_one(model, sounds, tmp_path):
    """Rows without and with audios of several lengths in one batch, padded on the left."""
    results = ask(model, rows_of(sounds), tmp_path)
    wanted = [expected(model, parts) for parts in PARTS]
    assert [result["response"] for result in results] == wanted
    assert len(set(wanted)) == len(wanted)
    assert [result.get("audios") for result in results] == [None, *([sound] for sound in sounds)]
    assert results[4]["messages"][0]["content"] == "say <audio> again"
    again = [
        {"messages": result["messages"][:-1]} | {key: result[key] for key in ("audios",) if key in result}
        for result in results
    ]
    assert [result["response"] for result in ask(model, again, tmp_path, max_batch_size=1)] == wanted


def test_spectrograms_are_those_of_each_audio_alone(model, sounds):
    """transformers' processor pads a batch with the spectrogram of silence, which the tower would see."""
    from transformers import AutoProcessor, AutoTokenizer

    vision = VisionProcessor.open(model, AutoTokenizer.from_pretrained(model), MediaOptions())
    assert vision
    media = [Medium("audio", path) for path in sounds]
    values = [(plan := vision.plan(medium), vision.decode(medium, plan)) for medium in media]
    batch = transformers_inputs(values, torch.zeros(4, 1, dtype=torch.int64), vision)
    processor = AutoProcessor.from_pretrained(model)
    for number, features in enumerate(batch["input_features"]):
        alone = processor(text=["<|audio_pad|>"], audio=[samples_of(number)])
        frames = alone["input_features"].shape[2]
        torch.testing.assert_close(features[:, :frames], alone["input_features"][0], rtol=0, atol=1e-6)
        assert torch.equal(batch["input_features_mask"][number, :frames], alone["input_features_mask"][0])
        assert not features[:, frames:].any()
        assert not batch["input_features_mask"][number, frames:].any()


def test_an_adapter_of_the_tower_answers_as_with_peft(model, sounds, tmp_path):
    from transformers import AutoModelForMultimodalLM

    network = AutoModelForMultimodalLM.from_pretrained(model)
    tiny.save_random_adapter(network, tmp_path / "adapter", target_modules=["q_proj", "linear_1"])
    rows = rows_of(sounds)[:3]
    wanted = [expected(model, parts, tmp_path / "adapter") for parts in PARTS[:3]]
    assert wanted[1] != expected(model, PARTS[1])
    for merge in (False, True):
        results = ask(model, rows, tmp_path, model="", adapters=[str(tmp_path / "adapter")], merge_lora=merge)
        assert [result["response"] for result in results] == wanted


def test_chat_asks_for_paths(model, sounds, monkeypatch, capsys):
    typed = f"<audio>what is it?\n{sounds[0]}\nclear\n<audio>what?\n/gone.wav\n"
    typed += f"<audio>{sounds[0]}</audio>what is it?\nexit\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    infer.run(InferOptions(model=str(model), temperature=0.0, max_new_tokens=NEW_TOKENS))
    printed = capsys.readouterr().out
    assert printed.count("audio, path or URL <<< ") == 2
    assert printed.count(f"<<< {expected(model, PARTS[1])}\n") == 2
    assert "error: /gone.wav: an audio cannot be read (no such file or directory)" in printed


def test_what_cannot_be_heard_is_named(model, sounds, tmp_path):
    good = {"query": "<audio>what?", "audios": sounds[:1]}
    with pytest.raises(ValueError, match=r"--val_dataset: .*data\.jsonl line 2: /gone\.wav: an audio cannot be read"):
        ask(model, [good, good | {"audios": ["/gone.wav"]}], tmp_path)
    tiny_vision.picture(70, 90).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"line 1: .*a\.png: the model takes no images"):
        ask(model, [{"query": "<image>what?", "images": [str(tmp_path / "a.png")]}], tmp_path)
