"""Limits of images from flags, variables and rows."""

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


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_families_are_found_by_their_type(checkpoint, family: str) -> None:
    vision = checkpoint(family).vision()
    assert vision.model_type == family in FAMILIES
    costs = [vision.cost((1, side, side)) for side in (8, 16, 64, 256)]
    assert costs == sorted(costs)
    assert vision.cost((4, 16, 16)) == 4 * vision.cost((1, 16, 16))
