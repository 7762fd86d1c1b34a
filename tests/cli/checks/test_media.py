"""Limits of images and videos on the command line."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from megaswift.cli.checks.data import check_media
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.templates.options import MediaOptions

from tests.cli.checks.test_checks import check

VISION = {"model_type": "qwen3_vl"}


def test_limits_have_no_effect_on_a_text_model(dense: Path) -> None:
    _, notes = check(dense, "--max_pixels 1000 --norm_bbox norm1000")
    assert [note for note in notes if "takes no images" in note] == [
        "--max_pixels 1000 has no effect: the model takes no images.",
        "--norm_bbox norm1000 has no effect: the model takes no images.",
    ]
    assert not any("images" in note for note in check(dense, "")[1])
    assert list(check_media(MediaOptions(max_pixels=1000), VISION)) == []
    assert list(check_media(MediaOptions(max_pixels=1000), None)) == []  # a hub's model, which the run reads


@pytest.mark.parametrize(
    ("kwargs", "variables", "message"),
    [
        ({"fps_frames": 3}, {}, "--model_kwargs: unknown name fps_frames. Use fps, fps_max_frames,"),
        ({"fps": "fast"}, {}, "--model_kwargs: fps fast: not a number"),
        ({}, {"MAX_PIXELS": "0"}, "MAX_PIXELS 0: not above 0"),
    ],
)
def test_values_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, kwargs, variables, message) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        list(check_media(MediaOptions(model_kwargs=kwargs), VISION))


def test_flags_of_the_guide(tmp_path: Path) -> None:
    words = ["sft", "--model", "m", "--model_kwargs", '{"fps_max_frames": 12}', "--max_pixels", "1003520"]
    options, _, _ = read_options("megatron", words)
    expected = SimpleNamespace(max_pixels=1003520, norm_bbox=None, model_kwargs={"fps_max_frames": 12})
    for name, value in vars(expected).items():
        assert getattr(options.data, name) == value
