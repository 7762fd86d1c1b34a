"""Rows with images, videos and audios together, beside transformers' processors and models."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megaswift.templates.batching.collator import BatchLayout, GlobalTotals
from megaswift.templates.dataset.samples import TokenizedSample
from megaswift.templates.formats.medium import Medium
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media.audios import read_audio
from PIL import Image

from tests.templates.media.test_processor import WORDS, normalised
from tests.tiny_audio import RATE, sound, wav
from tests.tiny_vision import picture

FAMILIES = ("qwen3_omni_moe", "qwen2_5_omni")
ROWS = 36
HOP = 160  # samples of a frame
KINDS = "image", "video", "audio"


def random_rows(folder: Path, seed: int) -> list[dict]:
    """Rows with 0 to 4 media anywhere in their messages: several of a kind, and of all kinds."""
    random_ = random.Random(seed)
    rows = []
    for number in range(ROWS):
        row: dict[str, Any] = {"messages": [], "images": [], "videos": [], "audios": []}
        for turn in range(random_.randint(1, 2)):
            parts = [" ".join(random_.choices(WORDS, k=random_.randint(1, 5)))]
            for medium in range(random_.choice([0, 1, 2, 2])):
                kind, name = random_.choices(KINDS, (4, 2, 3))[0], f"{number}-{turn}-{medium}"
                size = random_.randint(15, 300), random_.randint(15, 300)
                if kind == "audio":
                    file = folder / f"{name}.wav"
                    # Of whole frames: transformers counts a last part of the longest audio of a call otherwise.
                    file.write_bytes(wav(sound(HOP * random_.randint(3, 375), number)))
                    row["audios"].append(str(file))
                else:
                    files = [folder / f"{name}-{n}.png" for n in range(1 if kind == "image" else random_.randint(2, 7))]
                    for file in files:
                        picture(*size, seed=random_.randint(0, 10**6)).save(file)
                    names = [str(file) for file in files]
                    row[f"{kind}s"].append(names if kind == "video" else names[0])
                parts.insert(random_.randint(0, len(parts)), f"<{kind}>")
            answer = {"role": "assistant", "content": " ".join(random_.choices(WORDS, k=random_.randint(1, 9)))}
            row["messages"] += [{"role": "user", "content": "".join(parts)}, answer]
        if len(row["audios"]) == 1:
            Path(row["audios"][0]).write_bytes(wav(sound(random_.randint(400, 60000), number)))
        rows.append(row)
    return rows


def reference(processor: Any, row: dict, fps: float, *, prompt: bool = False) -> dict:
    """What transformers' processor makes of a row. prompt: the beginning of an answer follows"""
    messages = []
    for message in row["messages"]:
        pieces = re.split("<(image|video|audio)>", message["content"])
        blocks = [{"type": p} if p in KINDS else {"type": "text", "text": p} for p in pieces if p]
        messages.append(message | {"content": blocks})
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    media: dict[str, Any] = {
        "images": [Image.open(path).convert("RGB") for path in row["images"]],
        "videos": [np.stack([np.array(Image.open(p).convert("RGB")) for p in paths]) for paths in row["videos"]],
        "audio": [read_audio(path, RATE) for path in row["audios"]],
    }
    media = {name: values for name, values in media.items() if values}
    options = {"do_sample_frames": False, "fps": fps} if row["videos"] else {}
    return processor(text=[text], **media, **options, return_tensors="pt")


def spectrograms(processor: Any, paths: list[str]) -> torch.Tensor:
    """Those of each audio by itself: the end of a shorter one depends on the longest of a call."""
    features = []
    for path in paths:
        one = processor(text=processor.audio_token, audio=[read_audio(path, RATE)], return_tensors="pt")
        features.append(one["input_features"][0, :, : int(one["feature_attention_mask"].sum())].t())
    return torch.cat(features)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fps", [2, pytest.param(1, marks=pytest.mark.long)])
def test_rows_are_what_transformers_makes(family: str, fps: float, checkpoint, tmp_path: Path, monkeypatch) -> None:
    """Ids, positions, pixels and spectrograms, bit by bit."""
    from transformers import AutoModelForMultimodalLM

    monkeypatch.setenv("FPS", str(fps))
    made = checkpoint(family)
    rows = random_rows(tmp_path, seed=5)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = made.prepare(dataset=[str(tmp_path / "rows.jsonl")], dataset_shuffle=False, strict=True).train
    vision = made.vision()
    thinker: Any = AutoModelForMultimodalLM.from_pretrained(made.folder).thinker
    layout = BatchLayout(vision=vision)
    seen = dict.fromkeys(KINDS, 0)
    for number, row in enumerate(rows):
        expected = reference(made.processor, row, fps)
        [(ids, weights)] = store.row(number)
        assert ids.tolist() == expected["input_ids"][0].tolist()
        is_medium = np.isin(ids, vision.placeholder_ids)
        assert not weights[is_medium].any()
        assert weights.any()
        media = store.media(number)
        sample = TokenizedSample([(ids, weights)], np.empty(0), media=media)
        batch = layout.collate([[sample]], GlobalTotals(1.0))
        assert (batch.media is None) == (not media)
        if batch.media is None:
            continue
        lengths = expected.get("feature_attention_mask", torch.empty(0, 0)).sum(-1)
        seconds = torch.as_tensor(expected.get("video_second_per_grid", []))
        grids = [expected.get(f"{kind}_grid_thw") for kind in KINDS[:2]]
        positions, _ = thinker.get_rope_index(
            expected["input_ids"], *grids, expected["attention_mask"], False, lengths.long(), seconds
        )
        assert batch.rope_positions is not None
        assert torch.equal(batch.rope_positions.float(), positions)
        assert batch.media.grids.tolist() == [grid for part in grids if part is not None for grid in part.tolist()]
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            pixels = getattr(batch.media, f"{kind}_pixels")
            assert len(pixels) == len(expected.get(name, ()))
            if len(pixels):
                assert torch.equal(normalised(vision, pixels, kind), expected[name])
        assert batch.media.frames.tolist() == lengths.tolist()
        if row["audios"]:
            assert torch.equal(batch.media.spectrograms, spectrograms(made.processor, row["audios"]))
        tokens = [np.flatnonzero(ids == vision.placeholder_id(kind)).tolist() for kind in KINDS]
        assert batch.media.positions.tolist() == [place for places in tokens for place in places]
        for kind, places in zip(KINDS, tokens, strict=True):
            seen[kind] += bool(places)
    assert min(seen.values()) > 6


@pytest.mark.parametrize("family", FAMILIES)
def test_rates_without_whole_positions_are_refused(family: str, checkpoint) -> None:
    frames = [picture(64, 64, seed=number) for number in range(4)]
    vision = checkpoint(family).vision()
    step = vision.plan(Medium("video", frames)).time_step
    assert step == {"qwen3_omni_moe": 13, "qwen2_5_omni": 25}[family]
    with pytest.raises(UnusableRow, match=f"FPS 4 has patches of time {step / 2:g} positions apart"):
        vision.plan(Medium("video", frames, {"fps": 4}))


def film(path: Path, frames: int, samples: int, seed: int, sound_codec: str = "pcm_s16le") -> Path:
    """Write a film of some frames, ten a second, with a sound."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream, track = container.add_stream("mpeg4", rate=10), container.add_stream(sound_codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 32 * (2 + seed % 3), 64, "yuv420p"
        for number in range(frames):
            image = picture(stream.width, 64, seed=seed + number // 3)
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
        values = (sound(samples, seed) * 32767).clip(-32768, 32767).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(values[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        for part in (*av.AudioResampler(format=track.format, rate=RATE).resample(frame), None):
            container.mux(track.encode(part))
    return path


def rows_with_films(folder: Path) -> list[dict]:
    """Rows with films among images and audios: longer and shorter than their sound, and of several chunks of time."""
    random_ = random.Random(2)
    rows = []
    for number in range(12):
        parts, row = ["a"], dict[str, Any](images=[], videos=[], audios=[])
        for medium, kind in enumerate(random_.choices(KINDS, (1, 4, 1), k=1 + number % 3)):
            name = f"{number}-{medium}"
            if kind == "video":
                frames, hops = random_.randint(4, 80), random_.randint(5, 800)
                row["videos"].append(str(film(folder / f"{name}.mov", frames, HOP * hops, number)))
            elif kind == "audio":
                (folder / f"{name}.wav").write_bytes(wav(sound(HOP * random_.randint(3, 300), number)))
                row["audios"].append(str(folder / f"{name}.wav"))
            else:
                picture(random_.randint(15, 200), random_.randint(15, 200), number).save(folder / f"{name}.png")
                row["images"].append(str(folder / f"{name}.png"))
            parts.insert(random_.randint(0, len(parts)), f"<{kind}>")
        messages = [{"role": "user", "content": "".join(parts)}, {"role": "assistant", "content": "red"}]
        rows.append({"messages": messages} | row)
    # One sound of no whole frames.
    video = str(film(folder / "aac.mp4", 43, 50_000, 3, "aac"))
    messages = [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "blue"}]
    return [*rows, {"messages": messages, "images": [], "videos": [video], "audios": []}]


def sounds_of(row: dict) -> list[str]:
    """The files of a row that are heard, in order: videos and audios."""
    files = {kind: iter(row[f"{kind}s"]) for kind in KINDS}
    text = "".join(message["content"] for message in row["messages"])
    return [next(files[kind]) for kind in re.findall("<(video|audio)>", text)]


def reference_with_sound(processor: Any, row: dict, *, prompt: bool = False) -> dict:
    """What transformers' processor makes of a row with films, whose sound it interleaves with the frames."""
    from transformers.video_utils import load_video

    messages = []
    for message in row["messages"]:
        pieces = re.split("<(image|video|audio)>", message["content"])
        blocks = [{"type": p} if p in KINDS else {"type": "text", "text": p} for p in pieces if p]
        messages.append(message | {"content": blocks})
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    videos = [load_video(path, backend="pyav") for path in row["videos"]]
    media: dict[str, Any] = {
        "images": [Image.open(path).convert("RGB") for path in row["images"]],
        "videos": [frames for frames, _ in videos],
        "audio": [read_audio(path, RATE) for path in sounds_of(row)],
        "video_metadata": [metadata for _, metadata in videos],
    }
    media = {name: values for name, values in media.items() if values}
    options = {"do_sample_frames": True, "fps": 2} if videos else {}
    return processor(text=[text], **media, **options, use_audio_in_video=True, return_tensors="pt")


@pytest.mark.parametrize("family", FAMILIES)
def test_films_are_what_transformers_makes(family: str, checkpoint, tmp_path: Path) -> None:
    """Ids, positions, pixels and spectrograms of videos with their sound."""
    from transformers import AutoModelForMultimodalLM

    made, rows = checkpoint(family), rows_with_films(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sounds = {"use_audio_in_video": True}
    options = {"dataset_shuffle": False, "strict": True, "model_kwargs": sounds}
    store = made.prepare(dataset=[str(tmp_path / "rows.jsonl")], **options).train
    vision = made.vision(model_kwargs=sounds)
    thinker: Any = AutoModelForMultimodalLM.from_pretrained(made.folder).thinker
    layout, ends = BatchLayout(vision=vision), set()
    for number, row in enumerate(rows):
        expected = reference_with_sound(made.processor, row)
        [(ids, weights)] = store.row(number)
        assert ids.tolist() == expected["input_ids"][0].tolist()
        assert not weights[np.isin(ids, vision.placeholder_ids)].any()
        batch = layout.collate(
            [[TokenizedSample([(ids, weights)], np.empty(0), media=store.media(number))]], GlobalTotals(1.0)
        )
        assert batch.media is not None
        grids = [expected.get(f"{kind}_grid_thw") for kind in KINDS[:2]]
        if any(grid is not None for grid in grids):  # else the model's positions are those of text
            lengths = expected.get("feature_attention_mask", torch.empty(0, 0)).sum(-1).long()
            seconds = torch.as_tensor(expected.get("video_second_per_grid", []))
            positions, _ = thinker.get_rope_index(
                expected["input_ids"], *grids, expected["attention_mask"], True, lengths, seconds
            )
            assert batch.rope_positions is not None
            assert torch.equal(batch.rope_positions.float(), positions.float())
        assert batch.media.grids.tolist() == [grid for part in grids if part is not None for grid in part.tolist()]
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            pixels = getattr(batch.media, f"{kind}_pixels")
            if len(pixels):
                assert torch.equal(normalised(vision, pixels, kind), expected[name])
        heard = [medium.plan.grid[0] for medium in store.media(number) if medium.plan.kind == "audio"]
        assert heard == expected.get("feature_attention_mask", torch.empty(0, 0)).sum(-1).tolist()
        assert batch.media.frames.tolist() == heard
        if heard:
            assert torch.equal(batch.media.spectrograms, spectrograms(made.processor, sounds_of(row)))
        tokens = [np.flatnonzero(ids == vision.placeholder_id(kind)).tolist() for kind in KINDS]
        assert batch.media.positions.tolist() == [place for places in tokens for place in places]
        ends |= {
            int(ids[place - 1]) for place in np.flatnonzero(ids == vision.enclosing(vision.placeholders["audio"])[1][0])
        }
    assert len(ends) == 2  # some films end with frames, and some with sounds


def test_the_sound_of_videos_is_of_omni_models(checkpoint, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="USE_AUDIO_IN_VIDEO true: qwen3_vl does not hear the sound of videos"):
        checkpoint("qwen3_vl").vision(model_kwargs={"use_audio_in_video": True})
    monkeypatch.setenv("USE_AUDIO_IN_VIDEO", "yes")
    with pytest.raises(ValueError, match="USE_AUDIO_IN_VIDEO yes: unknown"):
        checkpoint("qwen3_omni_moe").vision()
    monkeypatch.setenv("USE_AUDIO_IN_VIDEO", "0")
    assert checkpoint("qwen3_omni_moe").vision().sound is None
    monkeypatch.setenv("USE_AUDIO_IN_VIDEO", "1")
    vision = checkpoint("qwen3_omni_moe").vision()
    with pytest.raises(UnusableRow, match="a list of frames has no sound"):
        vision.plan(Medium("video", [picture(64, 64, seed=number) for number in range(4)]))
