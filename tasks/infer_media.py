"""Images, videos and audios of `swift infer`: in prompts, chat and result file, and as inputs of transformers' models.

Parsing, sizes, tokens and pixels are those of training.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..bridge.checkpoint.pretrained import load_tokenizer
from ..templates.dataset.placed_media import PlacedMedium, collapse
from ..templates.dataset.transformers_inputs import transformers_inputs
from ..templates.formats.media_rows import open_tags, to_media_conversation
from ..templates.formats.medium import KINDS, Medium, to_tags
from ..templates.formats.schemas import UnusableRow
from ..templates.json_types import Json, JsonObject
from ..templates.media.families import FAMILIES
from ..templates.media.images import open_image
from ..templates.media.processor import VisionProcessor
from ..templates.options import MediaOptions

if TYPE_CHECKING:
    from torch import Tensor

    from .rollout.engine import Request


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt, with all tokens of its media, and these."""

    ids: list[int]
    media: Sequence[PlacedMedium] = ()
    name: str = field(default="", compare=False)  # name of its row


def open_vision(folder: Path, options: MediaOptions) -> VisionProcessor | None:
    """Return the processor of media in `folder`; None without its files, and for other families."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict) or config.get("model_type") not in FAMILIES:
        return None
    return VisionProcessor.open(folder, load_tokenizer(folder), options)


def check_readable(media: Iterable[Medium], vision: VisionProcessor) -> None:
    """Raise UnusableRow, which names the file, for a medium that cannot be read by its header."""
    for medium in media:
        with _named(medium):
            vision.plan(medium)


@contextmanager
def _named(medium: Medium) -> Iterator[None]:
    """Put the name of a medium before the reason why it cannot be used."""
    try:
        yield
    except UnusableRow as error:
        name = _name(medium.source)
        raise UnusableRow(f"{name}: {error}" if name else str(error)) from error


def _name(source: Json) -> str:
    """Return the path or URL of a source; "" if it has none."""
    match source:
        case str():
            return source if len(source) <= 300 else f"{source[:40]}..."
        case {"path": str(path)}:
            return path
        case [first, *_]:
            return f"frames from {name}" if (name := _name(first)) else ""
    return ""


def media_inputs(prompts: Sequence[EncodedPrompt], tokens: "Tensor", vision: VisionProcessor) -> dict[str, "Tensor"]:
    """Return the inputs of a transformers model for the media of a left-padded batch; {} without any.

    tokens: int64 [prompts, longest]. Raises ValueError, naming row and file, for a medium that cannot be decoded.
    """
    media = [(placed.plan, _decode(prompt, placed, vision)) for prompt in prompts for placed in prompt.media]
    return transformers_inputs(media, tokens, vision)


def _decode(prompt: EncodedPrompt, placed: PlacedMedium, vision: VisionProcessor) -> np.ndarray:
    assert placed.medium is not None
    with _named_row(prompt, placed.medium):
        return vision.decode(placed.medium, placed.plan)


@contextmanager
def _named_row(prompt: EncodedPrompt, medium: Medium) -> Iterator[None]:
    """Raise ValueError, naming row and file, for a medium that cannot be used."""
    try:
        with _named(medium):
            yield
    except UnusableRow as error:
        raise ValueError(f"--val_dataset: {prompt.name}: {error}" if prompt.name else str(error)) from error


def to_request(prompt: EncodedPrompt, vision: VisionProcessor | None) -> "Request":
    """Return a prompt with its media as engines take them. Raises ValueError as `media_inputs`."""
    from .rollout.engine import Request
    from .rollout.request_audio import training_audio
    from .rollout.request_image import RequestImage, resized_image
    from .rollout.request_video import training_video

    images, videos, audios = [], [], []
    has_videos = any(placed.plan.kind == "video" for placed in prompt.media)
    for placed in prompt.media:
        assert placed.medium is not None
        assert vision is not None
        with _named_row(prompt, placed.medium):  # decoded here, since engines would be given a grey image
            if placed.plan.kind == "video":
                videos.append(training_video(placed, vision))
                _ = videos[-1].sampled
            elif placed.plan.kind == "audio":
                audios.append(training_audio(placed, vision))
                audios[-1].load()
            elif has_videos:
                images.append(resized_image(placed, vision))
                _ = images[-1].pixels
            else:
                pixels = open_image(placed.medium.source, allow_private=vision.allow_private)
                limits = vision.limits.of_row(placed.medium.limits)
                least, most = limits.min_pixels, limits.max_pixels
                images.append(RequestImage.within(lambda pixels=pixels: pixels, least, most, vision))
    tokens = collapse(prompt.ids, prompt.media, vision.placeholders) if vision else prompt.ids
    return Request(tokens, 0, images=images, prompt_length=len(prompt.ids), videos=videos, audios=audios)


def count_videos(media: Iterable[Medium]) -> int:
    return sum(medium.kind == "video" for medium in media)


def check_videos(vision: VisionProcessor | None, most: int) -> None:
    """Raise ValueError if vLLM does not take the videos of a model. most: videos of a prompt"""
    from .rollout.vllm_images import takes_videos

    if most and vision and not takes_videos(vision):
        raise ValueError(
            "--infer_backend vllm: takes videos of Qwen3-VL and Qwen3.5 alone. Set --infer_backend transformers."
        )


def read_query(text: str, vision: VisionProcessor, ask: Callable[[str], str]) -> tuple[str, list[Medium]]:
    """Return a query of the chat with sentinels, and its media. `ask` returns the path of each tag, as `<image>`.

    Raises UnusableRow for media that cannot be read.
    """
    columns: dict[str, list[Json]] = {"images": [], "videos": [], "audios": []}
    for kind in open_tags(text):
        columns[f"{kind}s"].append(ask(kind))
    row: JsonObject = {"messages": [{"role": "user", "content": text}], **columns}
    conversation, _ = to_media_conversation(row, answered=False)
    check_readable(conversation.media, vision)
    return conversation.messages[0]["content"], conversation.media


def with_tags(messages: Iterable[JsonObject]) -> list[JsonObject]:
    """Return messages with tags in place of sentinels."""
    return [
        message | {"content": to_tags(content)} if (content := message["content"]) else message for message in messages
    ]


def count_media(messages: Iterable[JsonObject]) -> int:
    """Return the number of sentinels in messages."""
    return sum(character in KINDS for message in messages for character in message.get("content") or "")
