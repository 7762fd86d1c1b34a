"""Files of processors that do not fit the model, or the rules that are known."""

import json
from pathlib import Path
from typing import Any

import pytest
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.templates.formats.medium import Medium
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import MediaOptions

from tests import tiny_vision

PUBLISHED = {
    "in_patch_limit": 120,
    "patch_limit_on_one_side": 18,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "fixed_output_tokens": None,
}  # of the code of Kimi-K2.5's checkpoints, for the tiny one


def opened(folder: Path, file: str, **changes: Any) -> VisionProcessor | None:
    """Return the processor of a checkpoint, of which a file has other settings."""
    path = folder / file
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(settings | changes))
    return VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())


def test_tiles_of_another_size(tmp_path: Path) -> None:
    folder = tiny_vision.FAMILIES["llama4"](tmp_path)
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    with pytest.raises(ValueError, match=r"tiles of 56 x 56 pixels.* expected are those of config\.json, 28 x 28"):
        opened(folder, "config.json", vision_config=vision | {"image_size": 28})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("vision_aspect_ratio", "anyres_max_4", "vision_aspect_ratio anyres_max_3, and expected is anyres_max_4"),
        ("image_grid_pinpoints", [[32, 64]], r"image_grid_pinpoints \[.*, and expected is \[\(32, 64\)\]"),
    ],
)
def test_tokens_of_other_settings(name: str, value: Any, said: str, tmp_path: Path) -> None:
    folder = tiny_vision.FAMILIES["llava_onevision"](tmp_path)
    assert opened(folder, "config.json")
    with pytest.raises(ValueError, match=said):
        opened(folder, "config.json", **{name: value})


def test_frames_of_another_size(tmp_path: Path) -> None:
    """Than that of images, which can still be used."""
    folder = tiny_vision.FAMILIES["llava_onevision"](tmp_path)
    settings = json.loads((folder / "processor_config.json").read_text())["video_processor"]
    frame = tiny_vision.picture(40, 40)
    for name, value, said in (
        ("size", {"height": 28, "width": 28}, r"frames would have size \(28, 28\) .*, and images have \(32, 32\)"),
        ("image_mean", [0.4] * 3, r"frames would have image_mean .0.4.*, and images have .0.5"),
    ):
        vision = opened(folder, "processor_config.json", video_processor=settings | {name: value})
        assert vision is not None
        assert vision.plan(Medium("image", frame)).grid == (5, 2, 2)
        with pytest.raises(UnusableRow, match=said):
            vision.plan(Medium("video", [frame] * 2))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("use_covering_area_grid", False, "use_covering_area_grid False, and expected is True"),
        ("crop_to_patches", False, "crop_to_patches False, and expected is True"),
        ("image_seq_length", 5, "image_seq_length 5, and expected is 4"),
        ("image_token_id", 7, r"tokens \[.*, and expected is \[.*, 7\]"),
    ],
)
def test_visual_tokens_of_other_settings(name: str, value: Any, said: str, tmp_path: Path) -> None:
    folder = tiny_vision.FAMILIES["ovis2"](tmp_path)
    assert opened(folder, "config.json")
    settings = json.loads((folder / "processor_config.json").read_text())
    changes = {name: value}
    if name in settings["image_processor"]:
        changes = {"image_processor": settings["image_processor"] | changes}
    with pytest.raises(ValueError, match=said):
        opened(folder, "config.json" if name == "image_token_id" else "processor_config.json", **changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_the_code_of_checkpoints(name: str, tmp_path: Path) -> None:
    """transformers' processor does not read them: those that differ from its own are refused."""
    folder = tiny_vision.FAMILIES["kimi_k25"](tmp_path)
    assert opened(folder, "preprocessor_config.json", media_proc_cfg=PUBLISHED)
    with pytest.raises(ValueError, match=f"media_proc_cfg has {name} 7, and only"):
        opened(folder, "preprocessor_config.json", media_proc_cfg=PUBLISHED | {name: 7})
