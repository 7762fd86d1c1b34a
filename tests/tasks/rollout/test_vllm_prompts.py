"""Requests as vLLM's prompts, without vLLM."""

from pathlib import Path
from typing import Any

import pytest
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.tasks.rollout.engine import Request
from megaswift.tasks.rollout.request_image import RequestImage
from megaswift.tasks.rollout.vllm_images import PromptWriter
from megaswift.templates.dataset.tokenize import place_media
from megaswift.templates.formats.medium import Medium
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import MediaOptions

from tests import tiny_vision

IMAGE, PATCH = 8, 9  # tokens of the tiny Llama 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a Llama 4 without its weights."""
    folder = tmp_path_factory.mktemp("llama4")
    return tiny_vision.FAMILIES["llama4"](folder)


def test_what_vllm_replaces_is_in_the_prompt(folder: Path) -> None:
    """For each image; not for what a model has drawn behind them."""
    picture = tiny_vision.picture(60, 40)
    image = RequestImage(lambda: picture, 1, 9, {"max_patches": 2})
    write = PromptWriter(folder)
    prompt = write(Request([1, PATCH, 5, PATCH, 6, PATCH], 0, images=[image, image]))
    assert prompt == {
        "prompt_token_ids": [1, IMAGE, 5, IMAGE, 6, PATCH],
        "multi_modal_data": {"image": [picture, picture]},
        "mm_processor_kwargs": {"max_patches": 2},
    }
    assert write(Request([1, PATCH], 0)) == {"prompt_token_ids": [1, PATCH]}


def test_a_text_that_vllm_takes_for_an_image_is_refused(tmp_path: Path) -> None:
    folder = tiny_vision.FAMILIES["internvl_chat"](tmp_path)
    tokenizer: Any = load_tokenizer(folder)
    image, text = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"), tokenizer.encode("<image>")
    picture = tiny_vision.picture(60, 40)
    images = [RequestImage(lambda: picture, 1, 9, {})]
    write = PromptWriter(folder)
    assert write(Request([1, image, 5], 0, images=images))["prompt_token_ids"] == [1, *text, 5]
    assert write(Request([1, *text], 0)) == {"prompt_token_ids": [1, *text]}
    with pytest.raises(ValueError, match="has the text <image>, which vLLM takes for an image"):
        write(Request([1, *text, image], 0, images=images))


def test_texts_have_nothing_that_vllm_replaces(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(["<|image|>", "<|patch|>"]) == [IMAGE, PATCH]
    vision = VisionProcessor(folder, tokenizer, MediaOptions())
    ids, medium = tokenizer("a<|image|>b<|patch|>", return_tensors="np")["input_ids"][0], Medium("image", "a.png", {})
    with pytest.raises(UnusableRow, match="other placeholders than its media"):
        place_media(ids, [medium], vision)
