"""`swift infer` with the thinkers of Omni models, beside transformers' own processor and generate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megaswift.bridge.checkpoint.answering_model import answering_model
from megaswift.tasks import infer
from megaswift.tasks.options import InferOptions
from megaswift.templates.media.audios import read_audio
from safetensors.torch import load_file, save_file

from tests import tiny, tiny_audio, tiny_omni, tiny_vision
from tests.templates.media.test_omni import HOP, film, reference, reference_with_sound
from tests.tiny_audio import RATE

pytestmark = pytest.mark.slow
NEW_TOKENS = 10
FRAME = 160  # samples
FRAMES = 37, 133, 260  # of spectrograms: less than a second, and others with an unfinished one


@pytest.fixture(scope="module", params=["qwen3_omni_moe", pytest.param("qwen2_5_omni", marks=pytest.mark.long)])
def model(request, tmp_path_factory) -> Path:
    return tiny_omni.FAMILIES[request.param](tmp_path_factory.mktemp(request.param), seed=2)  # its answers differ


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for number, frames in enumerate(FRAMES):
        (folder / f"{number}.wav").write_bytes(tiny_audio.wav(tiny_audio.sound(FRAME * frames, number)))
    for number in range(4):
        tiny_vision.picture(90 + 20 * number, 70, number).save(folder / f"{number}.png")
        tiny_vision.picture(80, 70, 9 + number).save(folder / f"frame{number}.png")
    return folder


def rows_of(files: Path) -> list[dict[str, Any]]:
    """Rows without media and with all kinds of them, some of whose audios are below a second."""
    images, audios = ([str(files / f"{number}.{kind}") for number in range(3)] for kind in ("png", "wav"))
    frames = [str(files / f"frame{number}.png") for number in range(4)]
    texts: list[tuple[str, list, list, list]] = [
        ("what is the sky?", [], [], []),
        ("<audio>what is it?", [], [], audios[:1]),
        ("<audio>what colour?", [], [], audios[1:2]),
        ("a<image>b<audio>c<video>", images[:1], [frames], audios[2:]),
        ("<video>what is <image>?", images[1:2], [frames[:2]], []),
        ("<audio><image>a", images[2:], [], audios[:1]),
    ]
    return [
        {"messages": [{"role": "user", "content": text}], "images": seen, "videos": watched, "audios": heard}
        for text, seen, watched, heard in texts
    ]


def expected(
    folder: Path, rows: list[dict[str, Any]], adapter: Path | None = None, *, has_sound: bool = False
) -> list[str]:
    """The answers of transformers, one prompt at a time. has_sound: videos are heard"""
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    processor = tiny_vision.processor_of(folder)
    network: Any = AutoModelForMultimodalLM.from_pretrained(folder).eval()
    network = PeftModel.from_pretrained(network, adapter) if adapter else network
    end, answers = processor.tokenizer.eos_token_id, []
    for row in rows:
        if has_sound:
            inputs = {**reference_with_sound(processor, row, prompt=True), "use_audio_in_video": True}
        else:
            inputs = reference(processor, row, 2, prompt=True)
        output = network.thinker.generate(
            **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=end, pad_token_id=end
        )
        answers.append(processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def ask(folder: Path, rows: list[dict[str, Any]], tmp_path: Path, **options: Any) -> list[str]:
    data, path = tmp_path / "data.jsonl", tmp_path / "result.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.unlink(missing_ok=True)
    settings = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "max_batch_size": 6, "result_path": str(path)}
    infer.run(InferOptions(**{"model": str(folder), "val_dataset": [str(data)], **settings, **options}))
    return [json.loads(line)["response"] for line in path.open(encoding="utf-8")]


def test_a_batch_answers_as_transformers_does_one_by_one(model, files, tmp_path):
    rows = rows_of(files)
    wanted = expected(model, rows)
    assert len(set(wanted)) == len(wanted)
    assert ask(model, rows, tmp_path) == wanted
    assert ask(model, rows, tmp_path, max_batch_size=1) == wanted


@pytest.mark.long
def test_videos_are_heard(model, files, tmp_path):
    """Beside rows without any: frames and sounds of different lengths."""
    films = [str(film(tmp_path / f"{n}.mov", 9 + 20 * n, HOP * (300 - 110 * n), n)) for n in range(2)]
    texts = [("<audio>what?<video>it", films[:1], [str(files / "0.wav")]), ("<video>", films[1:], [])]
    rows = [
        *(
            {"messages": [{"role": "user", "content": text}], "images": [], "videos": v, "audios": a}
            for text, v, a in texts
        ),
        *(row for row in rows_of(files) if not row["videos"]),
    ]
    wanted = expected(model, rows, has_sound=True)
    assert ask(model, rows, tmp_path, model_kwargs={"use_audio_in_video": True}) == wanted
    assert ask(model, rows[:2], tmp_path) != wanted[:2]


@pytest.mark.long
def test_an_adapter_of_both_towers_answers_as_with_peft(model, files, tmp_path):
    from transformers import AutoModelForMultimodalLM

    network = AutoModelForMultimodalLM.from_pretrained(model)
    tiny.save_random_adapter(network, tmp_path / "adapter", target_modules=["qkv", "q", "q_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if ".thinker." in name}, file)
    rows = rows_of(files)
    wanted = expected(model, rows, tmp_path / "adapter")
    assert sum(answer != other for answer, other in zip(wanted, expected(model, rows), strict=True)) > 3
    for merge in (False, True):
        assert ask(model, rows, tmp_path, adapters=[str(tmp_path / "adapter")], merge_lora=merge) == wanted


def test_what_is_refused(model, files, tmp_path):
    with pytest.raises(ValueError, match=r"--infer_backend vllm: takes videos of Qwen3-VL and Qwen3\.5 alone"):
        ask(model, rows_of(files)[3:4], tmp_path, infer_backend="vllm")


def test_features_of_an_audio_do_not_depend_on_others(model, files):
    """transformers' Qwen3-Omni pads an audio below a second to a longer one beside it, and does not mask that."""
    from transformers import AutoModelForMultimodalLM

    processor = tiny_vision.processor_of(model)
    audios = [read_audio(str(files / f"{number}.wav"), RATE) for number in (1, 0)]

    def features(thinker: Any, audios: list[Any]) -> torch.Tensor:
        inputs = processor(text=processor.audio_token * len(audios), audio=audios, return_tensors="pt")
        media = {name: inputs[name] for name in ("input_features", "feature_attention_mask")}
        return thinker.get_audio_features(**media, return_dict=True).last_hidden_state.detach()

    network = AutoModelForMultimodalLM.from_pretrained(model).eval()
    alone = torch.cat([features(network.thinker, [audio]) for audio in audios])
    upstream = (features(network.thinker, audios) - alone).abs().max()
    assert (upstream > 1e-3) == model.name.startswith("qwen3")
    torch.testing.assert_close(features(answering_model(network), audios), alone)
