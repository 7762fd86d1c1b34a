"""Tokens, grids, positions and pixels of images and videos, beside transformers' processors and models."""

import json
import random

import numpy as np
import pytest
import torch
from megaswift.templates.batching.collator import BatchLayout
from megaswift.templates.dataset.samples import TokenizedSample

from tests.tiny_vision import picture

FAMILIES = "qwen2_5_vl", "qwen3_vl", "glm4v", pytest.param("qwen3_5", marks=pytest.mark.long)
IMAGES_ONLY = ("glm4v",)
ROWS = 200
WORDS = ["what", "colour", "is", "the", "shape", "a", "red", "circle", "blue", "square", "sky", "picture"]


def random_rows(folder, count: int, seed: int, *, has_videos: bool = True) -> list[dict]:
    """Write pictures of random sizes, and return rows with 0 to 4 images and videos anywhere in their messages."""
    random_ = random.Random(seed)

    def draw(name: str, size: tuple[int, int], extension: str) -> str:
        path = folder / f"{name}.{extension}"
        picture(*size, seed=random_.randint(0, 10**6)).save(path)
        return str(path)

    rows = []
    for number in range(count):
        images, videos, messages = [], [], []
        for turn in range(random_.randint(1, 2)):
            parts = [" ".join(random_.choices(WORDS, k=random_.randint(1, 5)))]
            for medium in range(random_.choice([0, 1, 1, 2])):
                size, name = (random_.randint(15, 300), random_.randint(15, 300)), f"{number}-{turn}-{medium}"
                if not has_videos or random_.random() < 0.7:
                    images.append(draw(name, size, random_.choice(["jpg", "png", "webp"])))
                    tag = "<image>"
                else:
                    frames = random_.randint(2, 7)
                    videos.append([draw(f"{name}-{frame}", size, "png") for frame in range(frames)])
                    tag = "<video>"
                parts.insert(random_.randint(0, len(parts)), tag)
            messages += [
                {"role": "user", "content": "".join(parts)},
                {"role": "assistant", "content": " ".join(random_.choices(WORDS, k=random_.randint(1, 9)))},
            ]
        rows.append({"messages": messages, "images": images, "videos": videos})
    return rows


def reference(processor, row: dict) -> dict:
    """Return what transformers' processor makes of a row, the frames of its videos 2 per second."""
    from PIL import Image

    messages = []
    for message in row["messages"]:
        pieces = message["content"].replace("<image>", "\0image\0").replace("<video>", "\0video\0").split("\0")
        blocks = [{"type": p} if p in ("image", "video") else {"type": "text", "text": p} for p in pieces if p]
        messages.append(message | {"content": blocks})
    text = processor.apply_chat_template(messages, tokenize=False)
    if "<|user|>" in text:  # GLM: an answer ends where the next turn begins
        text += "<|user|>"
    images = [Image.open(path).convert("RGB") for path in row["images"]]
    videos = [np.stack([np.array(Image.open(path).convert("RGB")) for path in paths]) for paths in row["videos"]]
    metadata = [
        {"fps": 2.0, "total_num_frames": len(video), "frames_indices": list(range(len(video)))} for video in videos
    ]
    options = {"videos": videos, "video_metadata": metadata, "do_sample_frames": False} if videos else {}
    return processor(text=[text], images=images or None, **options, return_tensors="pt")


@pytest.fixture(scope="module", params=FAMILIES)
def prepared(request, checkpoint, tmp_path_factory):
    """Return a checkpoint, random rows and their token store."""
    made, folder = checkpoint(request.param), tmp_path_factory.mktemp("rows")
    rows = random_rows(folder, ROWS, seed=len(request.param), has_videos=request.param not in IMAGES_ONLY)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSCOPE_CACHE", str(folder / "cache"))
        store = made.prepare(dataset=[str(folder / "rows.jsonl")], dataset_shuffle=False).train
    assert len(store) == ROWS
    return made, rows, store


def normalised(vision, pixels: torch.Tensor, kind: str) -> torch.Tensor:
    """Return patches as transformers does: a float of each value, an image's twice, for the two halves of its time."""
    depth = 2 if kind == "video" else 1
    mean, std = (torch.tensor(values)[:, None, None] * 255.0 for values in (vision.mean, vision.std))
    values = (pixels.view(len(pixels), 3, depth, -1).float() - mean) / std
    return values.expand(-1, -1, 2, -1).reshape(len(pixels), -1)


def test_rows_are_what_transformers_makes(prepared) -> None:
    """Ids, grids, positions and pixels of 200 rows, bit by bit."""
    from transformers import AutoModelForImageTextToText

    made, rows, store = prepared
    vision, model = made.vision(), AutoModelForImageTextToText.from_pretrained(made.folder).model
    layout = BatchLayout(vision=vision)
    seen = {"image": 0, "video": 0}
    for number, row in enumerate(rows):
        expected = reference(made.processor, row)
        [(ids, weights)] = store.row(number)
        assert ids.tolist() == expected["input_ids"][0].tolist()
        is_visual = np.isin(ids, [vision.image_token_id, vision.video_token_id])
        assert not weights[is_visual].any()
        assert weights.any()
        media = store.media(number)
        batch = layout.collate([[TokenizedSample([(ids, weights)], np.empty(0), media=media)]], _totals())
        if not media:
            assert (batch.media, batch.rope_positions) == (None, None)
            continue
        grids = {kind: expected.get(f"{kind}_grid_thw") for kind in seen}
        assert batch.media.grids.tolist() == [
            grid for kind in seen if grids[kind] is not None for grid in grids[kind].tolist()
        ]
        arguments = {name: expected.get(name) for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
        positions, _ = model.get_rope_index(expected["input_ids"], expected["mm_token_type_ids"], **arguments)
        assert torch.equal(batch.rope_positions, positions)
        assert batch.media.positions.tolist() == [
            position
            for token in (vision.image_token_id, vision.video_token_id)
            for position in np.flatnonzero(ids == token).tolist()
        ]
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            pixels = getattr(batch.media, f"{kind}_pixels")
            if name in expected:
                assert torch.equal(normalised(vision, pixels, kind), expected[name])
                seen[kind] += 1
            else:
                assert pixels.shape == (0, 3 * vision.patch_size**2 * (2 if kind == "video" else 1))
    assert min(seen[kind] for kind in (["image"] if vision.video_token_id is None else seen)) > 40


def _totals():
    from megaswift.templates.batching.collator import GlobalTotals

    return GlobalTotals(1.0)
