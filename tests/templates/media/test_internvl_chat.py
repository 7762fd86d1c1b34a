"""Images of InternVLChatModel, beside the processing that its checkpoints publish, in PIL; and its chat templates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.bridge.families import family_of
from megaswift.templates.formats.medium import Medium
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import MediaOptions, PrepareOptions
from megaswift.templates.prepare import prepare
from PIL import Image

from tests import tiny_vision
from tests.tiny_vision_text import INTERN_TEMPLATE

TILE = 56
TEXTS_ALONE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_vision.FAMILIES["internvl_chat"](tmp_path / "model")


def opened(folder: Path, **settings: Any) -> VisionProcessor:
    """Return the processor of a checkpoint, of which config.json has other settings."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    processor = VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())
    assert processor
    return processor


def tiles(image: Image.Image, least: int, most: int) -> np.ndarray:
    """Return an image's tiles and its thumbnail: uint8 [tiles, TILE, TILE, 3]."""
    ratio, area, nearest, best = image.width / image.height, image.width * image.height, np.inf, (1, 1)
    shapes = {(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if least <= i * j <= most}
    for columns, rows in sorted(sorted(shapes), key=lambda shape: shape[0] * shape[1]):
        difference = abs(ratio - columns / rows)
        if difference < nearest or (difference == nearest and area > 0.5 * TILE**2 * columns * rows):
            nearest, best = difference, (columns, rows)
    columns, rows = best
    canvas = image.resize((columns * TILE, rows * TILE), Image.Resampling.BICUBIC)
    parts = [
        canvas.crop((column * TILE, row * TILE, (column + 1) * TILE, (row + 1) * TILE))
        for row in range(rows)
        for column in range(columns)
    ]
    if len(parts) > 1:
        parts.append(image.resize((TILE, TILE), Image.Resampling.BICUBIC))
    return np.stack([np.array(part) for part in parts])


@pytest.mark.parametrize(("least", "most"), [(1, 6), (2, 12)])
def test_pixels(folder: Path, least: int, most: int) -> None:
    processor = opened(folder, min_dynamic_patch=least, max_dynamic_patch=most)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    for size in ((40, 40), (200, 90), (90, 300), (333, 111), (120, 125)):
        image = tiny_vision.picture(*size)
        expected = (tiles(image, least, most) / 255 - mean) / std
        plan = processor.plan(Medium("image", image))
        assert (plan.grid[0], plan.tokens) == (len(expected), 4 * len(expected)), size
        values = processor.image_inputs([(plan, processor.decode(Medium("image", image), plan))])["pixel_values"]
        difference = np.abs(values.permute(0, 2, 3, 1).numpy() - expected)
        assert difference.max() < 2.1 / 255 / std.min(), size  # two roundings of a pixel


def test_defaults_are_those_of_the_class(folder: Path) -> None:
    """One tile; and squares of patches in the order of version 1, which is refused."""
    file = folder / "config.json"
    missing = "dynamic_image_size", "min_dynamic_patch", "max_dynamic_patch", "use_thumbnail"
    settings = {name: value for name, value in json.loads(file.read_text()).items() if name not in missing}
    file.write_text(json.dumps(settings))
    assert opened(folder).plan(Medium("image", tiny_vision.picture(300, 90))).tokens == 4
    opened(folder, dynamic_image_size=True)
    config = read_config(folder)
    with pytest.raises(ValueError, match="use_thumbnail False"):
        family_of(config).describe(config, vision=True)
    config.pop("ps_version")
    with pytest.raises(ValueError, match="ps_version 'v1'"):
        family_of(config).describe(config, vision=True)


def test_one_tile(folder: Path) -> None:
    assert opened(folder, dynamic_image_size=False).plan(Medium("image", tiny_vision.picture(300, 90))).tokens == 4


TEMPLATES = {
    "visual tokens": INTERN_TEMPLATE,
    "<image>": INTERN_TEMPLATE.replace("<IMG_CONTEXT>", "<image>"),
    "texts alone": TEXTS_ALONE,
}


def test_templates(folder: Path) -> None:
    """Whatever a checkpoint's template makes of images, a row has the same tokens."""
    picture = folder / "a.png"
    tiny_vision.picture(100, 60).save(picture)
    question = {"role": "user", "content": "what <image>is <image>this?"}
    messages = [{"role": "system", "content": "look"}, question, {"role": "assistant", "content": "a red circle"}]
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"messages": messages, "images": [str(picture)] * 2}) + "\n")
    encoded = {}
    for name, template in TEMPLATES.items():
        (folder / "chat_template.jinja").write_text(template)
        options = PrepareOptions(dataset=[str(rows)])
        tokenizer = load_tokenizer(folder)
        vision = VisionProcessor.open(folder, tokenizer, options)
        prepared = prepare(options, tokenizer, stage="sft", vision=vision)
        [(ids, _)] = prepared.train.row(0)
        encoded[name] = ids.tolist()
    assert len({json.dumps(ids) for ids in encoded.values()}) == 1, encoded
    tokenizer = load_tokenizer(folder)
    text = tokenizer.decode(encoded["texts alone"])
    # Three columns and two rows of tiles, and the whole image.
    image = f"<img>{'<IMG_CONTEXT>' * 4 * 7}</img>\n"
    assert text.count(image) == 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ps_version", "v1", "ps_version 'v1'"),
        ("use_thumbnail", False, "use_thumbnail False"),
        ("force_image_size", 112, "force_image_size 112"),
        ("downsample_ratio", 0.25, "downsample_ratio 0.25"),
        ("select_layer", -4, "select_layer -4"),
        ("pad2square", True, "pad2square True"),
    ],
)
def test_settings_that_are_refused(name: str, value: Any, said: str, folder: Path) -> None:
    config = read_config(folder)
    assert family_of(config).describe(config, vision=True).vision
    with pytest.raises(ValueError, match=said):
        family_of(config).describe(config | {name: value}, vision=True)
