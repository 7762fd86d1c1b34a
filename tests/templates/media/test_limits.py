"""Limits of images from flags, variables and rows."""

import numpy as np
import pytest
from megaswift.templates.formats.medium import Medium
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media.families import FAMILIES

from tests.tiny_vision import picture

LARGE = picture(900, 600)  # more than the tiny processors' 64 tokens
TOKEN = 32 * 32


def tokens(checkpoint, limits: dict | None = None, **options) -> int:
    return checkpoint("qwen3_vl").vision(**options).plan(Medium("image", LARGE, limits or {})).tokens


def test_the_checkpoint_limits_without_flags(checkpoint) -> None:
    assert 48 <= tokens(checkpoint) <= 64


@pytest.mark.parametrize(
    ("options", "variables", "most"),
    [
        ({"max_pixels": 30 * TOKEN}, {}, 30),
        ({"max_pixels": 10**9}, {}, 64),
        ({}, {"MAX_PIXELS": 40 * TOKEN}, 40),
        ({}, {"MAX_PIXELS": 200 * TOKEN}, 200),
        ({}, {"IMAGE_MAX_TOKEN_NUM": 20}, 20),
        ({}, {"IMAGE_MAX_TOKEN_NUM": 20, "MAX_PIXELS": 40 * TOKEN}, 40),
        ({"max_pixels": 12 * TOKEN}, {"MAX_PIXELS": 40 * TOKEN}, 12),
        ({"model_kwargs": {"max_pixels": 24 * TOKEN}}, {"MAX_PIXELS": 40 * TOKEN}, 24),
        ({"model_kwargs": {"image_max_token_num": 100}}, {}, 100),
    ],
)
def test_the_most_tokens_of_an_image(checkpoint, monkeypatch, options, variables, most) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert 0.6 * most <= tokens(checkpoint, **options) <= most


def test_the_fewest_tokens_of_an_image(checkpoint, monkeypatch) -> None:
    small = Medium("image", picture(20, 20))
    assert checkpoint("qwen3_vl").vision().plan(small).tokens == 4
    monkeypatch.setenv("IMAGE_MIN_TOKEN_NUM", "25")
    assert checkpoint("qwen3_vl").vision().plan(small).tokens == 25
    monkeypatch.setenv("MIN_PIXELS", str(16 * TOKEN))
    assert checkpoint("qwen3_vl").vision().plan(small).tokens == 16


def test_limits_of_a_row_go_before_all_others(checkpoint) -> None:
    assert tokens(checkpoint, {"max_pixels": 15 * TOKEN}, max_pixels=30 * TOKEN) <= 15
    small = Medium("image", picture(20, 20), {"min_pixels": 16 * TOKEN})
    assert checkpoint("qwen3_vl").vision().plan(small).tokens == 16
    with pytest.raises(UnusableRow, match="a max_pixels below min_pixels"):
        tokens(checkpoint, {"max_pixels": 10})


@pytest.mark.parametrize(
    ("options", "variables", "grid"),
    [
        ({}, {}, (1, 12, 16)),  # 224 pixels on the longer side
        ({"max_pixels": 140 * 140}, {}, (1, 8, 10)),
        ({"max_pixels": 10**9}, {}, (1, 12, 16)),
        ({}, {"MAX_PIXELS": str(280 * 280)}, (1, 14, 20)),
        ({"model_kwargs": {"image_max_token_num": 25}}, {}, (1, 8, 10)),
    ],
)
def test_limits_of_the_longer_side(checkpoint, monkeypatch, options, variables, grid) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = checkpoint("mistral3")
    plan = made.vision(**options).plan(Medium("image", LARGE))
    assert plan.grid == grid
    rows = np.array(plan.expansion).reshape(grid[1] // 2, -1)
    assert rows.shape[1] == grid[2] // 2 + 1
    names = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
    assert [rows[0, 0], rows[0, -1], rows[-1, -1]] == made.tokenizer.convert_tokens_to_ids(list(names))


@pytest.mark.parametrize(
    ("options", "variables", "tiles"),
    [
        ({}, {}, 7),  # 2 x 3 of them, and one of all
        ({"max_pixels": 5 * 56 * 56}, {}, 5),
        ({"max_pixels": 56 * 56}, {}, 1),
        ({}, {"IMAGE_MAX_TOKEN_NUM": "24"}, 7),
        ({}, {"MIN_PIXELS": str(5 * 56 * 56)}, 7),
    ],
)
def test_limits_of_tiles(checkpoint, monkeypatch, options, variables, tiles) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plan = checkpoint("internvl").vision(**options).plan(Medium("image", LARGE))
    assert (plan.grid, plan.tokens, plan.length) == ((tiles, 4, 4), 4 * tiles, 4 * tiles + 2)


@pytest.mark.parametrize(("max_pixels", "tiles"), [(None, 7), (4 * 56 * 56, 5), (56 * 56, 1), (1, 1)])
def test_limits_of_separated_tiles(checkpoint, max_pixels, tiles) -> None:
    """Of a picture that is wide enough for all tiles in two rows."""
    options = {} if max_pixels is None else {"max_pixels": max_pixels}
    plan = checkpoint("llama4").vision(**options).plan(Medium("image", picture(300, 200)))
    separators = {7: 6, 5: 4, 1: 0}[tiles]  # between the tiles of a row, and behind each row
    assert (plan.grid, plan.tokens, plan.length) == ((tiles, 4, 4), 4 * tiles, 4 * tiles + separators + 3)


@pytest.mark.parametrize(("max_pixels", "tiles"), [(None, 7), (4 * 56 * 56, 5), (56 * 56, 1), (1, 1)])
def test_limits_of_tiles_between_visual_tokens(checkpoint, max_pixels, tiles) -> None:
    options = {} if max_pixels is None else {"max_pixels": max_pixels}
    plan = checkpoint("ovis2").vision(**options).plan(Medium("image", picture(300, 200)))
    visual = 4 * tiles + {7: 8, 5: 6, 1: 3}[tiles]
    assert (plan.grid, plan.tokens, plan.length) == ((tiles, 4, 4), visual, visual)


def test_limits_of_images_that_the_model_decides(checkpoint) -> None:
    vision = checkpoint("llava_onevision").vision()
    assert vision.plan(Medium("image", picture(30, 90))).grid == (4, 2, 2)  # three tiles, and one of all
    with pytest.raises(UnusableRow, match="it limits pixels, and the model's image_grid_pinpoints decide"):
        vision.plan(Medium("image", LARGE, {"max_pixels": 9 * 32 * 32 - 1}))


def test_models_without_a_smallest_size(checkpoint, monkeypatch) -> None:
    vision = checkpoint("mistral3").vision()
    assert vision.plan(Medium("image", picture(20, 20))).grid == (1, 2, 2)
    with pytest.raises(UnusableRow, match="it sets min_pixels, and images of this model have no smallest size"):
        vision.plan(Medium("image", LARGE, {"min_pixels": 5000}))
    with pytest.raises(UnusableRow, match="no pixel left"):
        vision.plan(Medium("image", picture(1000, 10), {"max_pixels": 60 * 60}))
    monkeypatch.setenv("IMAGE_MIN_TOKEN_NUM", "25")
    with pytest.raises(ValueError, match="IMAGE_MIN_TOKEN_NUM 25: images of this model have no smallest size"):
        checkpoint("mistral3").vision()


def test_the_ratio_of_sides(checkpoint, monkeypatch) -> None:
    long = Medium("image", picture(2000, 10))
    assert checkpoint("qwen3_vl").vision().plan(long).tokens > 0
    monkeypatch.setenv("MAX_RATIO", "199")
    vision = checkpoint("qwen3_vl").vision()
    with pytest.raises(UnusableRow, match="more than 199 times as long as it is wide"):
        vision.plan(long)


@pytest.mark.parametrize(
    ("options", "variables", "message"),
    [
        ({}, {"MAX_PIXELS": "many"}, "MAX_PIXELS many: not a number. Set one above 0."),
        ({}, {"FPS": "-1"}, "FPS -1: not above 0"),
        ({}, {"QWENVL_BBOX_FORMAT": "old"}, "QWENVL_BBOX_FORMAT old: unknown. Use legacy or new."),
        ({}, {"FPS_MAX_FRAMES": "2"}, "FPS_MAX_FRAMES 2: below FPS_MIN_FRAMES 4"),
        ({"max_pixels": 100}, {}, "--max_pixels 100: below the fewest pixels of an image, 4,096"),
        ({"model_kwargs": {"max_pixel": 1}}, {}, "--model_kwargs: unknown name max_pixel. Use fps,"),
        ({"model_kwargs": {"fps": [1]}}, {}, r"--model_kwargs: fps \[1\]: not a number"),
    ],
)
def test_values_that_cannot_be_used(checkpoint, monkeypatch, options, variables, message) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        checkpoint("qwen3_vl").vision(**options)


def test_every_limit_is_part_of_the_cache_key(checkpoint, monkeypatch) -> None:
    made, seen = checkpoint("qwen3_vl"), set()
    for name, value in [("", ""), ("MAX_PIXELS", "60000"), ("FPS", "1"), ("VIDEO_TOTAL_PIXELS", "70000"),
                        ("QWENVL_BBOX_FORMAT", "new"), ("FRAME_FACTOR", "4"), ("MAX_RATIO", "20")]:  # fmt: skip
        with monkeypatch.context() as patch:
            if name:
                patch.setenv(name, value)
            seen.add(str(made.vision().fingerprint))
    for options in ({"norm_bbox": "none"}, {"max_pixels": 50_000}, {"allow_private_media_urls": True}):
        seen.add(str(made.vision(**options).fingerprint))
    assert len(seen) == 10


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3", "internvl"])
def test_families_are_found_by_their_type(checkpoint, family: str) -> None:
    vision = checkpoint(family).vision()
    assert vision.model_type == family in FAMILIES
    costs = [vision.cost((1, side, side)) for side in (8, 16, 64, 256)]
    assert costs == sorted(costs)
    assert vision.cost((4, 16, 16)) == 4 * vision.cost((1, 16, 16))
