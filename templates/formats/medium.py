"""Images and videos of a row, and the characters that stand for them in its texts."""

from dataclasses import dataclass, field
from typing import Literal

from ..json_types import Json, JsonObject

MediaKind = Literal["image", "video"]

# Unicode reserves these characters for use within a program: no text may have them.
IMAGE, VIDEO = "\ufdd0", "\ufdd1"
SENTINELS: dict[MediaKind, str] = {"image": IMAGE, "video": VIDEO}
KINDS: dict[str, MediaKind] = {sentinel: kind for kind, sentinel in SENTINELS.items()}


@dataclass(frozen=True)
class Medium:
    """Image or video of a row."""

    kind: MediaKind
    source: Json  # path, URL, data URI, base64, {"bytes", "path"}, PIL image; of a video also a list of images
    limits: JsonObject = field(default_factory=dict)  # of the row's chat_template_kwargs: max_pixels, min_pixels, fps


def has_sentinels(text: str) -> bool:
    return IMAGE in text or VIDEO in text


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
