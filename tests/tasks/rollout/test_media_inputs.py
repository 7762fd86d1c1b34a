"""Media of requests in transformers' engine: the prompts and inputs of the checkpoint's own processor."""

from typing import Any

import pytest
import torch
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.tasks.rollout.engine import Request
from megaswift.tasks.rollout.media_inputs import RequestInputs
from megaswift.tasks.rollout.request_image import RequestImage
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import MediaOptions

from tests import tiny_vision

pytestmark = pytest.mark.slow
PLACEHOLDERS = {"qwen3_vl": "<|image_pad|>", "glm4v": "<|image|>", "mistral3": "[IMG]", "internvl": "<IMG_CONTEXT>"}
PLACEHOLDERS |= {"llama4": "<|image|>", "kimi_k25": "<|media_pad|>", "llava_onevision": "<image>"}
PLACEHOLDERS |= {"ovis2": "<image>", "gemma4": "<|image|>", "gemma4_unified": "<|image|>"}

# In the requests of a run, which has another than the texts of processors.
IMAGE = {"llama4": "<|patch|>", "ovis2": "<IMG_ATOM>"}


@pytest.mark.parametrize("family", PLACEHOLDERS)
def test_inputs_are_those_of_the_processor(family: str, tmp_path) -> None:
    """Some images are above the limits, the checkpoint's or others; one image is there twice."""
    from transformers import AutoProcessor

    folder = tiny_vision.FAMILIES[family](tmp_path / family)
    processor: Any = AutoProcessor.from_pretrained(folder)
    vision = VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())
    assert vision is not None
    limits = [(vision.limits.min_pixels, vision.limits.max_pixels), (1, 20_000)]
    for least, most in limits[: 1 if family == "llava_onevision" else 2]:  # whose images have no other limits
        pictures = [tiny_vision.picture(*size, seed=size[0]) for size in ((500, 400), (90, 300))]
        images = [RequestImage.within(lambda picture=picture: picture, least, most, vision) for picture in pictures]
        used = [[0, 1], [1]]
        texts = ["what? " + "a " * len(numbers) + PLACEHOLDERS[family] * len(numbers) for numbers in used]
        token = PLACEHOLDERS[family]
        prompts = [text.replace(token, IMAGE.get(family, token)) for text in texts]
        requests = [
            Request(
                vision_ids(processor, text.replace(token, IMAGE.get(family, token))),
                0,
                images=[images[number] for number in numbers],
            )
            for text, numbers in zip(texts, used, strict=True)
        ]
        media_inputs = RequestInputs(folder)
        prompts, media = media_inputs.expand(requests)
        expected = [
            processor(text=[text], images=[pictures[n] for n in numbers], return_tensors="pt", **images[0].arguments)
            for text, numbers in zip(texts, used, strict=True)
        ]
        assert prompts == [one["input_ids"][0].tolist() for one in expected]
        pictures_of_texts = [[pictures[n] for n in numbers] for numbers in used]
        if family == "llava_onevision":  # cut into tiles only as one list
            pictures_of_texts = [picture for pictures_of_text in pictures_of_texts for picture in pictures_of_text]
        given = processor(
            text=texts, images=pictures_of_texts, padding=True, return_tensors="pt",
            **images[0].arguments,
        )  # fmt: skip
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        inputs = media_inputs.inputs(media, tokens)
        inputs.pop("mm_token_type_ids", None)
        assert inputs.keys() == given.keys() - {"input_ids", "attention_mask", "mm_token_type_ids", "batch_num_images"}
        if family == "llava_onevision":  # whose tower does not see the last pixels of a tile
            given["pixel_values"][..., 28:, :] = given["pixel_values"][..., 28:] = 0
        if family.startswith("gemma4"):  # padded to the most patches, and not to those of the largest image
            most = inputs["pixel_values"].shape[1]
            assert not given["pixel_values"][:, most:].any()
            given |= {name: given[name][:, :most] for name in ("pixel_values", "image_position_ids")}
        assert all(torch.equal(inputs[name], given[name].to(inputs[name].dtype)) for name in inputs)


def vision_ids(processor: Any, text: str) -> list[int]:
    return processor.tokenizer(text, add_special_tokens=False)["input_ids"]
