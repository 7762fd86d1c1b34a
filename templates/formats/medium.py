"""Images, videos and audios of a row, and the characters that stand for them in its texts."""

import base64
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..json_types import Json, JsonObject

MediaKind = Literal["image", "video", "audio"]

# Unicode reserves these characters for use within a program: no text may have them.
IMAGE, VIDEO, AUDIO = "\ufdd0", "\ufdd1", "\ufdd4"
SENTINELS: dict[MediaKind, str] = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
KINDS: dict[str, MediaKind] = {sentinel: kind for kind, sentinel in SENTINELS.items()}
TAGS = str.maketrans({sentinel: f"<{kind}>" for kind, sentinel in SENTINELS.items()})
LONGEST_NAME = 300  # characters; a longer source is data


@dataclass(frozen=True)
class Medium:
    """Image, video or audio of a row."""

    kind: MediaKind
    source: Json  # path, URL, data URI, base64, {"bytes", "path"}, PIL image; of a video also a list of images
    limits: JsonObject = field(default_factory=dict)  # of the row's chat_template_kwargs: max_pixels, min_pixels, fps
    is_sound: bool = False  # an audio: that of the video with this source and these limits

    @property
    def sound(self) -> "Medium":
        """The sound of a video."""
        return Medium("audio", self.source, self.limits, is_sound=True)


def has_sentinels(text: str) -> bool:
    return any(sentinel in text for sentinel in KINDS)


def count_sentinels(text: str) -> int:
    return sum(text.count(sentinel) for sentinel in KINDS)


def to_blocks(text: str) -> list[JsonObject]:
    """Return a text with sentinels as the content blocks that chat templates take."""
    blocks: list[JsonObject] = []
    start = 0
    for position, character in enumerate(text):
        if kind := KINDS.get(character):
            if position > start:
                blocks.append({"type": "text", "text": text[start:position]})
            blocks.append({"type": kind})
            start = position + 1
    return [*blocks, {"type": "text", "text": text[start:]}] if start < len(text) else blocks


def to_tags(text: str) -> str:
    """Return a text with `<image>`, `<video>` and `<audio>` in place of sentinels."""
    return text.translate(TAGS)


def from_tags(text: str) -> str:
    """Return a text with sentinels in place of `<image>`, `<video>` and `<audio>`."""
    for kind, sentinel in SENTINELS.items():
        text = text.replace(f"<{kind}>", sentinel)
    return text


def media_columns(media: Iterable[Medium], convert: Callable[[Any], Json]) -> JsonObject:
    """Return the columns `images`, `videos` and `audios` of a row, without those that are empty.

    convert: a source to a value
    """
    columns: dict[str, list[Json]] = {}
    for medium in media:
        columns.setdefault(f"{medium.kind}s", []).append(convert(medium.source))
    return dict(columns)


def is_picture(source: object) -> bool:
    """Return whether a source is an image of PIL, which need not be installed."""
    return type(source).__module__.partition(".")[0] == "PIL"


def json_source(source: Any) -> Json:
    """Return a source as JSON: bytes without a file as a data URI."""
    match source:
        case list() | tuple():
            return [json_source(frame) for frame in source]
        case {"path": str(path), **others} if others.get("bytes") is None or os.path.exists(path):
            return path
        case {"bytes": bytes(data)} | bytes(data):
            return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
        case str():
            return source
    return None


def source_name(source: Any) -> Json:
    """Return the path or URL of a source, or of each frame of a list; None for data."""
    if isinstance(source, list | tuple):
        return [source_name(frame) for frame in source]
    name = json_source(source) if isinstance(source, str) or (isinstance(source, dict) and "path" in source) else None
    return name if isinstance(name, str) and len(name) <= LONGEST_NAME and not name.startswith("data:") else None
