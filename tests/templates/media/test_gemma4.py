"""Images of Gemma 4 beside transformers' processor: sizes within a budget of tokens, and published chat templates."""

import json
import math
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trl
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.templates.formats.medium import Medium
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media.families import differing_setting, vision_family
from megaswift.templates.media.image_rules import SOFT_TOKENS, BudgetImages
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare

from tests.tiny_vision import picture

PUBLISHED = sorted(path.stem for path in (Path(trl.__file__).parent / "chat_templates").glob("gemma4*.jinja"))
TOKEN = 12 * 12  # pixels of a visual token of the tiny checkpoint


@pytest.mark.parametrize("patch", [4, 16])
@pytest.mark.parametrize("budget", SOFT_TOKENS)
def test_sizes_are_those_of_transformers(checkpoint, budget: int, patch: int) -> None:
    """Small, large, wide and tall images, and strips that are thinner than a visual token."""
    from transformers import Gemma4ImageProcessor
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    rules = BudgetImages(Gemma4ImageProcessor(patch_size=patch, max_soft_tokens=budget), (1, 2, 3), ())
    limits = replace(checkpoint("gemma4").vision().limits, max_pixels=rules.most_pixels, max_ratio=math.inf)
    assert rules.processor_arguments(1, rules.most_pixels) == {"max_soft_tokens": budget}
    random_, factor, thinnest = random.Random(budget), 3 * patch, set()
    sizes = [(1, 1), (5, 9000), (9000, 5), (7, 1), (factor, factor * budget), (factor * budget, factor), (4000, 3000)]
    sizes += [(random_.randint(1, 3000), random_.randint(1, 3000)) for _ in range(300)]
    sizes += [(random_.randint(1, 9), random_.randint(900, 9000)) for _ in range(100)]
    for size in sizes:
        expected = get_aspect_ratio_preserving_size(*size, patch, 9 * budget, 3)
        assert rules.resized(*size, limits) == expected
        grid = rules.grid(*size, limits)
        assert grid == (1, expected[0] // patch, expected[1] // patch)
        tokens = expected[0] * expected[1] // factor**2
        assert rules.expansion(grid, size, limits).tolist() == [1, *[2] * tokens, 3]
        assert rules.tokens(grid, size, limits) == tokens <= budget
        thinnest.add(min(expected) // factor)
    assert 1 in thinnest
    assert len(thinnest) > 5


@pytest.mark.parametrize("size", [(20, 16), (1700, 1300), (2500, 30), (25, 1900)])
def test_pixels_are_those_of_transformers(checkpoint, size: tuple[int, int]) -> None:
    """Bit by bit, of images that grow and that shrink, as the inputs of transformers' model."""
    made = checkpoint("gemma4")
    vision, medium = made.vision(model_kwargs={"image_max_token_num": 280}), Medium("image", picture(*size))
    plan = vision.plan(medium)
    expected = made.processor.image_processor(images=[medium.source], max_soft_tokens=280, return_tensors="pt")
    assert expected.pop("num_soft_tokens_per_image").tolist() == [plan.tokens]
    inputs = vision.image_inputs([(plan, vision.decode(medium, plan))])
    assert inputs.keys() == expected.keys()
    assert all(torch.equal(inputs[name], expected[name][:, : 9 * plan.tokens]) for name in inputs)


@pytest.mark.parametrize(
    ("options", "variables", "budget"),
    [
        ({}, {}, 70),
        ({"max_pixels": 10**9}, {}, 70),  # the flag only lowers
        ({"max_pixels": 300 * TOKEN}, {"IMAGE_MAX_TOKEN_NUM": "560"}, 280),
        ({}, {"MAX_PIXELS": str(280 * TOKEN)}, 280),
        ({}, {"MAX_PIXELS": str(280 * TOKEN - 1)}, 140),
        ({"model_kwargs": {"image_max_token_num": 100_000}}, {}, 1120),
    ],
)
def test_limits_are_budgets(checkpoint, monkeypatch: pytest.MonkeyPatch, options, variables, budget: int) -> None:
    """Limits of pixels and of visual tokens go to the next budget that transformers' processor takes."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = checkpoint("gemma4")
    vision, image = made.vision(**options), picture(311, 190)
    arguments = vision.processor_arguments(vision.limits.min_pixels, vision.limits.max_pixels)
    assert arguments == {"max_soft_tokens": budget}
    (expected,) = made.processor.image_processor(images=[image], **arguments)["num_soft_tokens_per_image"]
    assert vision.plan(Medium("image", image)).tokens == expected


def test_limits_of_a_row(checkpoint) -> None:
    vision = checkpoint("gemma4").vision()

    def tokens(**limits: int) -> int:
        return vision.plan(Medium("image", picture(300, 300), limits)).tokens

    assert (tokens(), tokens(max_pixels=140 * TOKEN), tokens(max_pixels=70 * TOKEN)) == (64, 121, 64)
    with pytest.raises(UnusableRow, match="it sets max_pixels below 10,080, the fewest of this model's images"):
        tokens(max_pixels=70 * TOKEN - 1)
    with pytest.raises(UnusableRow, match="it sets min_pixels, and images of this model have no smallest size"):
        tokens(min_pixels=2)


def test_limits_that_no_image_meets(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--max_pixels 10079: below the fewest .*, 10,080. Set at least these.$"):
        checkpoint("gemma4").vision(max_pixels=70 * TOKEN - 1)
    with pytest.raises(ValueError, match=r"MAX_PIXELS: below the fewest pixels of an image, 10,080"):
        checkpoint("gemma4").vision(model_kwargs={"image_max_token_num": 69})
    monkeypatch.setenv("MIN_PIXELS", "20000")
    with pytest.raises(ValueError, match="MIN_PIXELS 20000: images of this model have no smallest size"):
        checkpoint("gemma4").vision()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_chat_templates(checkpoint, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system prompt, and images before, within and behind the texts of two turns, two of them side by side."""
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    made, images = checkpoint("gemma4"), [picture(*size) for size in ((90, 200), (64, 64), (333, 70))]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    texts = ["You see.", "<image>what colour is the <image><image>?", "a red circle", "the sky?", "blue"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    row = {
        "messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)],
        "images": [str(tmp_path / f"{number}.png") for number in range(3)],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = load_tokenizer(made.folder)
    tokenizer.chat_template = template
    options = PrepareOptions(dataset=[str(tmp_path / "rows.jsonl")])
    (document,) = prepare(options, tokenizer, stage="sft", vision=made.vision()).train.row(0)
    image = {"type": "image"}
    content = [image, {"type": "text", "text": "what colour is the "}, image, image, {"type": "text", "text": "?"}]
    messages = [
        message | ({"content": content} if "<image>" in message["content"] else {}) for message in row["messages"]
    ]
    text = made.processor.apply_chat_template(messages, chat_template=template, tokenize=False)
    expected = made.processor(text=[text], images=images, return_tensors="pt")["input_ids"][0].tolist()
    assert document[0].tolist() == expected
    learned = tokenizer.decode(document[0][document[1] > 0])
    assert learned.replace("\n", "") == "a red circle<turn|>blue<turn|>"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"videos": [["0.png"]], "content": "<video>what?"}, "it has videos, which are not supported with gemma4"),
        ({"audios": ["0.wav"], "content": "<audio>what?"}, "it has audios, which are not supported with gemma4"),
        *(
            ({"content": f"what is {token}?"}, "a message contains the literal <|image|>")
            for token in ("<|image|>", "<|video|>", "<|audio|>")
        ),
    ],
)
def test_media_that_are_left_out(checkpoint, tmp_path: Path, row: dict, said: str, monkeypatch) -> None:
    """Videos, audios, and texts with tokens in whose place transformers expects features."""
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    messages = [{"role": "user", "content": row["content"]}, {"role": "assistant", "content": "blue"}]
    media = {name: values for name, values in row.items() if name != "content"}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, **media}) + "\n")
    with pytest.raises(ValueError, match=re.escape(said)):
        checkpoint("gemma4").prepare(dataset=[str(tmp_path / "rows.jsonl")])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("patch_size", 8, "patch_size 8, and expected is 4"),
        ("pooling_kernel_size", 2, "pooling_kernel_size 2, and expected is 3"),
        ("do_normalize", True, "do_normalize True, and expected is False"),
        ("do_resize", False, "do_resize False, and expected is True"),
        ("rescale_factor", 0.5, "rescale_factor 0.5, and expected is 0.0039"),
        ("eoi_token_id", 3, "eoi_token_id 9, and expected is 3"),
    ],
)
def test_files_of_other_settings(checkpoint, tmp_path: Path, name: str, value: float, said: str) -> None:
    folder = shutil.copytree(checkpoint("gemma4").folder, tmp_path / "model")
    is_token = name.endswith("_id")
    file = folder / ("config.json" if is_token else "processor_config.json")
    settings = json.loads(file.read_text())
    (settings if is_token else settings["image_processor"])[name] = value
    file.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=said):
        VisionProcessor.open(folder, load_tokenizer(folder), PrepareOptions())


@pytest.mark.parametrize(
    ("kind", "value", "has_blocks"),
    [
        ("gemma4", "vision", True),
        ("gemma4", None, False),
        ("gemma4", ..., False),
        ("gemma4_unified", "vision", True),
        ("gemma4_unified", None, False),
        ("gemma4_unified", ..., True),
        ("gemma3", ..., True),
    ],
)
def test_images_attend_in_both_directions_where_the_config_says_so(kind: str, value, has_blocks: bool) -> None:
    """Without the key as by transformers' default."""
    text = {} if value is ... else {"use_bidirectional_attention": value}
    config = {"model_type": kind, "text_config": text}
    assert vision_family(config).has_blocks == has_blocks
    other = {"model_type": kind, "text_config": {"use_bidirectional_attention": None if has_blocks else "vision"}}
    differs = None if kind == "gemma3" else "use_bidirectional_attention"
    assert differing_setting(config, other) == differs
