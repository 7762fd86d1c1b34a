"""Tokens, grids, positions and pixels of images and videos, beside transformers' processors and models."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from megaswift.templates.batching.collator import BatchLayout
from megaswift.templates.dataset.samples import TokenizedSample

from tests.tiny_vision import picture

FAMILIES = (
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    pytest.param("glm46v", marks=pytest.mark.long),
    "mistral3",
    "internvl",
    "kimi_vl",
    "gemma3",
    "gemma4",
    pytest.param("gemma4_elastic", marks=pytest.mark.long),
    pytest.param("gemma4_unified", marks=pytest.mark.long),
    "llama4",
    "llava_onevision",
    pytest.param("ovis2", marks=pytest.mark.long),
    pytest.param("kimi_k25", marks=pytest.mark.long),
    pytest.param("llava", marks=pytest.mark.long),
    pytest.param("qwen3_5", marks=pytest.mark.long),
)
IMAGES_ONLY = "mistral3", "internvl", "kimi_vl", "gemma3", "gemma4", "gemma4_unified", "llava", "llama4"
IMAGES_ONLY += "kimi_k25", "ovis2", "gemma4_elastic"
ROWS = 200
WORDS = ["what", "colour", "is", "the", "shape", "a", "red", "circle", "blue", "square", "sky", "picture"]


def random_rows(folder, count: int, seed: int, *, has_videos: bool = True, images_first: bool = False) -> list[dict]:
    """Write pictures of random sizes, and return rows with 0 to 4 images and videos anywhere in their messages."""
    random_ = random.Random(seed)

    def draw(name: str, size: tuple[int, int], extension: str) -> str:
        path = folder / f"{name}.{extension}"
        picture(*size, seed=random_.randint(0, 10**6)).save(path)
        return str(path)

    rows = []
    for number in range(count):
        images, videos, messages = [], [], []
        frames = random_.randint(2, 7)  # LLaVA-OneVision's processor makes one tensor of a row's videos
        for turn in range(random_.randint(1, 2)):
            parts = [" ".join(random_.choices(WORDS, k=random_.randint(1, 5)))]
            for medium in range(random_.choice([0, 1, 1, 2])):
                size, name = (random_.randint(15, 300), random_.randint(15, 300)), f"{number}-{turn}-{medium}"
                if not has_videos or random_.random() < 0.7:
                    images.append(draw(name, size, random_.choice(["jpg", "png", "webp"])))
                    tag = "<image>"
                else:
                    videos.append([draw(f"{name}-{frame}", size, "png") for frame in range(frames)])
                    tag = "<video>"
                parts.insert(random_.randint(0, len(parts)), tag)
            if images_first:
                tags = iter(sorted(part for part in parts if part[0] == "<"))
                parts = [next(tags) if part[0] == "<" else part for part in parts]
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
    inputs = processor(text=[text], images=images or None, **options, return_tensors="pt")
    if hasattr(processor, "tile_global_token") and images:  # Llama 4's, which puts all of an image behind its tiles
        shapes = [processor.image_processor(images=[image])["aspect_ratios"][0] for image in images]
        inputs["tiles"] = [math.prod(shape) + (math.prod(shape) > 1) for shape in shapes]
    elif "grids" in getattr(processor, "unused_input_names", ()) and images:  # Ovis2's
        shapes = processor.image_processor(images=images)["grids"]
        inputs["tiles"] = [math.prod(shape) + (math.prod(shape) > 1) for shape in shapes]
    elif hasattr(getattr(processor, "image_processor", None), "crop_to_patches") and images:
        tiles = processor.image_processor.get_number_of_image_patches
        inputs["tiles"] = [tiles(image.height, image.width, {"crop_to_patches": True}) for image in images]
    return inputs


@pytest.fixture(scope="module", params=FAMILIES)
def prepared(request, checkpoint, tmp_path_factory):
    """Return a checkpoint, random rows and their token store."""
    made, folder = checkpoint(request.param), tmp_path_factory.mktemp("rows")
    has_videos, images_first = request.param not in IMAGES_ONLY, request.param == "llava_onevision"  # by its template
    rows = random_rows(folder, ROWS, len(request.param), has_videos=has_videos, images_first=images_first)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSCOPE_CACHE", str(folder / "cache"))
        store = made.prepare(dataset=[str(folder / "rows.jsonl")], dataset_shuffle=False).train
    assert len(store) == ROWS
    return made, rows, store


def normalised(vision, pixels: torch.Tensor, kind: str) -> torch.Tensor:
    """Return patches as transformers does: a float of each value, an image's twice, for the two halves of its time."""
    depth = vision.temporal_patch_size if kind == "video" else 1
    repeats = vision.temporal_patch_size // depth
    mean, std = (torch.tensor(values)[:, None, None] for values in (vision.mean, vision.std))
    values = pixels.view(len(pixels), 3, depth, -1)
    if vision.model_type == "llama4":  # in bfloat16
        return (((values.bfloat16() * (1 / 255)) - mean.bfloat16()) / std.bfloat16()).reshape(len(pixels), -1)
    values = (values.float() - mean * 255.0) / (std * 255.0)
    return values.repeat(1, 1, repeats, 1).reshape(len(pixels), -1)


def pixels_of(expected: dict, kind: str) -> torch.Tensor | None:
    """Return the values of images or videos of transformers' processor as patches in the order of ours."""
    values = expected.get("pixel_values" if kind == "image" else "pixel_values_videos")
    if values is None or values.dim() == 2:
        return values
    if values.dim() == 5:  # frames of LLaVA-OneVision, or tiles, behind which are those of padding
        counts = [len(video) for video in values]
        if kind == "image":
            counts = [grid[0] for grid in grids_of(expected)[: len(values)]]
        values = torch.cat([image[:count] for image, count in zip(values, counts, strict=True)])
        patches = values[..., :28, :28].unfold(2, 14, 14).unfold(3, 14, 14)
        return patches.permute(0, 2, 3, 1, 4, 5).flatten(0, 2).flatten(1)
    if "image_grid_hws" in expected or values.shape[-1] == 14:  # patches of the Kimi models, row by row
        return torch.cat([squares_of(image, *grid[1:]) for image, grid in split_images(expected)])
    if "image_position_ids" in expected:  # patches of Gemma 4, row by row, behind which are those of padding
        patch = math.isqrt(values.shape[2] // 3)
        patches = values.unflatten(2, (patch, patch, 3)).permute(0, 1, 4, 2, 3)
        images = [(image[: math.prod(grid)], grid) for image, grid in zip(patches, grids_of(expected), strict=True)]
        if patch == 12:  # Gemma 4 12B: visual tokens are patches
            return torch.cat([image.flatten(1) for image, _ in images])
        pixels = [squares_of(image, *grid[1:], side=3) for image, grid in images]
        return 2 * (torch.cat(pixels) - 0.5)  # as the model then does
    patches = []
    sizes = expected["image_sizes"].tolist() if "image_sizes" in expected else [[*image.shape[1:]] for image in values]
    for image, (height, width) in zip(values, sizes, strict=True):
        assert not image[:, height:].any()
        assert not image[:, :, width:].any()
        squares = image[:, :height, :width].unfold(1, 28, 28).unfold(2, 28, 28)  # [3, rows, columns, 28, 28]
        for row in range(squares.shape[1]):
            for column in range(squares.shape[2]):
                square = squares[:, row, column]
                patches += [square[:, y : y + 14, x : x + 14].flatten() for y in (0, 14) for x in (0, 14)]
    return torch.stack(patches)


def split_images(expected: dict) -> list[tuple[torch.Tensor, list[int]]]:
    """Return the patches of each image of Kimi-VL's processor, row by row, and its grid."""
    grids = grids_of(expected)
    return list(zip(expected["pixel_values"].split([math.prod(grid) for grid in grids]), grids, strict=True))


def squares_of(patches: torch.Tensor, rows: int, columns: int, side: int = 2) -> torch.Tensor:
    """Return patches [rows * columns, ...] square by square of side x side."""
    order = torch.arange(rows * columns).view(rows // side, side, columns // side, side).transpose(1, 2).flatten()
    return patches[order].flatten(1)


def tiles_of(height: int, width: int) -> tuple[int, int]:
    """Return the rows and columns of tiles of an image of tests/tiny_vision_tiles.py's LLaVA-OneVision."""
    from transformers.image_processing_utils import select_best_resolution

    pinpoints = [[32 * rows, 32 * columns] for rows in range(1, 4) for columns in range(1, 4)]
    best = select_best_resolution((height, width), pinpoints)
    return best[0] // 32, best[1] // 32


def grids_of(expected: dict) -> list[list[int]]:
    if "image_grid_hws" in expected:
        return [[1, *size] for size in expected["image_grid_hws"].tolist()]
    if "image_position_ids" in expected:
        return [[1, row + 1, column + 1] for column, row in expected["image_position_ids"].amax(1).tolist()]
    if "batch_num_images" in expected or getattr(expected.get("pixel_values_videos"), "ndim", 0) == 5:
        sizes = expected["image_sizes"].tolist() if "image_sizes" in expected else []
        frames = [len(video) for video in expected.get("pixel_values_videos", [])]
        return [[count, 2, 2] for count in (*(1 + math.prod(tiles_of(*size)) for size in sizes), *frames)]
    if "image_sizes" in expected:
        return [[1, height // 14, width // 14] for height, width in expected["image_sizes"].tolist()]
    if "tiles" in expected:
        return [[tiles, 4, 4] for tiles in expected["tiles"]]
    if "image_grid_thw" not in expected and "pixel_values" in expected and expected["pixel_values"].dim() == 4:
        return [[1, *(side // 14 for side in expected["pixel_values"].shape[2:])]] * len(expected["pixel_values"])
    grids = [expected.get(f"{kind}_grid_thw") for kind in ("image", "video")]
    return [grid for part in grids if part is not None for grid in part.tolist()]


def test_ovis2_cuts_images_as_transformers_does() -> None:
    """Rectangles of tiles that keep equal shares of an image too, such as 4 and 6 strips of 68 x 251 pixels."""
    from megaswift.templates.media.tile_rules import _covering_rectangle
    from transformers.models.ovis2.image_processing_ovis2 import get_min_tile_covering_grid

    random_ = random.Random(0)
    cases = [(random_.randint(15, 900), random_.randint(15, 900), random_.choice([28, 448])) for _ in range(300)]
    for height, width, tile in [(251, 68, 28), *cases]:
        columns, rows = get_min_tile_covering_grid((height, width), tile, 9 if tile == 448 else 6)
        assert _covering_rectangle(height, width, tile, 9 if tile == 448 else 6) == (rows, columns)


def test_rows_are_what_transformers_makes(prepared) -> None:
    """Ids, grids, positions and pixels of 200 rows, bit by bit."""
    from transformers import AutoModelForImageTextToText

    made, rows, store = prepared
    vision = made.vision()
    model: Any = AutoModelForImageTextToText.from_pretrained(made.folder).model if vision.family.has_axes else None
    layout = BatchLayout(vision=vision)
    seen = {"image": 0, "video": 0}
    for number, row in enumerate(rows):
        expected = reference(made.processor, row)
        [(ids, weights)] = store.row(number)
        assert ids.tolist() == expected["input_ids"][0].tolist()
        is_visual = np.isin(ids, vision.placeholder_ids)
        is_of_videos = ids == vision.video_token_id
        if vision.family.has_image_tokens:
            is_of_videos = expected["mm_token_type_ids"][0].numpy() == 2
        assert not weights[is_visual].any()
        assert weights.any()
        media = store.media(number)
        batch = layout.collate([[TokenizedSample([(ids, weights)], np.empty(0), media=media)]], _totals())
        if not media:
            assert (batch.media, batch.rope_positions) == (None, None)
            continue
        assert batch.media.grids.tolist() == grids_of(expected)
        if vision.family.has_axes:
            names = "image_grid_thw", "video_grid_thw", "second_per_grid_ts"
            arguments = {name: expected.get(name) for name in names}
            positions, _ = model.get_rope_index(expected["input_ids"], expected["mm_token_type_ids"], **arguments)
            assert torch.equal(batch.rope_positions, positions)
        else:
            assert batch.rope_positions is None
        if vision.family.has_blocks:
            visual = [place for _, first, end in batch.blocks.tolist() for place in range(first, end)]
            assert visual == expected[vision.family.block_types][0].nonzero().flatten().tolist()
            assert len(batch.blocks) == len(row["images"])
        else:
            assert batch.blocks is None
        assert batch.media.positions.tolist() == [
            position
            for of_videos in (False, True)
            for position in np.flatnonzero(is_visual & (is_of_videos == of_videos)).tolist()
        ]
        for kind in seen:
            pixels = getattr(batch.media, f"{kind}_pixels")
            if (values := pixels_of(expected, kind)) is not None:
                tolerance = 1e-6 if vision.model_type.startswith("gemma4") else 0  # they round otherwise
                torch.testing.assert_close(normalised(vision, pixels, kind), values, rtol=0, atol=tolerance)
                seen[kind] += 1
            else:
                assert pixels.shape == (0, vision.patch_values(kind))
    assert min(seen[kind] for kind in (["image"] if vision.video_token_id is None else seen)) > 40


def _totals():
    from megaswift.templates.batching.collator import GlobalTotals

    return GlobalTotals(1.0)
