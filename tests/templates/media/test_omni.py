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
            # By itself: the end of a shorter one depends on the longest of a call.
            alone = [
                made.processor(text=made.processor.audio_token, audio=[read_audio(path, RATE)], return_tensors="pt")
                for path in row["audios"]
            ]
            features = [one["input_features"][0, :, : int(one["feature_attention_mask"].sum())].t() for one in alone]
            assert torch.equal(batch.media.spectrograms, torch.cat(features))
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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sound_of_videos_is_refused(family: str, checkpoint, monkeypatch) -> None:
    with pytest.raises(ValueError, match="USE_AUDIO_IN_VIDEO true: the sound of a video is not supported"):
        checkpoint(family).vision(model_kwargs={"use_audio_in_video": "true"})
    monkeypatch.setenv("USE_AUDIO_IN_VIDEO", "1")
    with pytest.raises(ValueError, match="USE_AUDIO_IN_VIDEO 1: the sound of a video is not supported"):
        checkpoint(family).vision()
    monkeypatch.setenv("USE_AUDIO_IN_VIDEO", "0")
    assert checkpoint(family).vision().audio is not None
