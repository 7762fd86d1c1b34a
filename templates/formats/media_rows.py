"""Rows with images, videos and audios: their conversation or text, with the media in order.

- columns `images`, `videos` and `audios` (also singular), with the tags `<image>`, `<video>` and `<audio>` in any
  message; media without a tag come before the first message of the user
- blocks of OpenAI (`image_url`, `video_url`, `input_audio`, `audio_url`), Anthropic (`image` with a `source`) and
  transformers (`image`, `video`, `audio`)
- `<img>path</img>`, `<video>path</video>`, `<audio>path</audio>`

paired_media_rows.py converts rows of several documents.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from ..json_types import Json, JsonObject
from .medium import SENTINELS, MediaKind, Medium, has_sentinels
from .schemas import (
    MEDIA,
    MESSAGES,
    STRUCTURED,
    Conversation,
    UnusableRow,
    drop_missing,
    parse_json,
    require_string,
    template_kwargs,
    to_conversation,
    to_text,
)

COLUMNS: dict[MediaKind, tuple[str, ...]] = {kind: (f"{kind}s", kind) for kind in SENTINELS}
BLOCKS: dict[str, MediaKind] = {
    "image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
# A block becomes a tag with the number of its source, until all texts of the row are known.
OPEN, CLOSE = "\ufdd2", "\ufdd3"
TAG = re.compile(
    rf"<img>(?P<image>.+?)</img>|<video>(?P<video>[^<]+)</video>|<audio>(?P<audio>[^<]+)</audio>|<(?P<tag>image|video|audio)>|"
    rf"{OPEN}(?P<block>\d+){CLOSE}",
    re.DOTALL,
)
LIMITS = ("max_pixels", "min_pixels", "fps")
SIDES = ("rejected", "positive", "negative")  # prefixes of the columns of other texts than the row's first
# Columns with messages: those that may be written as JSON, and those whose text is an answer.
JSON_MESSAGES = (*MESSAGES, "prompt", "rejected_messages", "positive_messages", "negative_messages")
ANSWERS = ("completion", "chosen", "rejected", "rejected_response")


@dataclass
class MediaRow:
    """Row without its media, and these."""

    row: JsonObject
    columns: dict[MediaKind, Sequence[Json]]  # media of the row's columns, by kind
    blocks: list[tuple[MediaKind, Json]]  # of blocks within messages; source None: the next of the columns
    objects: JsonObject | None  # regions of images, to be named in the texts
    limits: JsonObject
    # Columns such as `rejected_images` by their prefix, if the row has any.
    sides: dict[str, dict[MediaKind, Sequence[Json]]] = field(default_factory=dict)

    def place(
        self, texts: Sequence[str], first: int, columns: dict[MediaKind, Sequence[Json]]
    ) -> tuple[list[str], list[Medium]]:
        """Return texts with a sentinel for each medium, and these. Media without a tag come before text `first`."""
        placed = _Texts(columns, self.blocks)
        contents = [placed.place(text) for text in texts]
        before, media = placed.media(first, self.limits)
        contents[first] = before + contents[first]
        return contents, media

    def place_in(self, conversation: Conversation, side: str = "") -> None:
        """Put sentinels into the messages of a conversation, and set its media.

        side: prefix of the columns that go before those without one
        """
        messages = conversation.messages
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
        columns = self.columns | self.sides.get(side, {})
        contents, conversation.media = self.place([message["content"] for message in messages], first, columns)
        conversation.messages = [
            {**message, "content": content} for message, content in zip(messages, contents, strict=True)
        ]


@dataclass
class _Texts:
    """Texts with sentinels, and the media found there."""

    columns: dict[MediaKind, Sequence[Json]]
    blocks: list[tuple[MediaKind, Json]]
    places: list[list[tuple[MediaKind, Json]]] = field(default_factory=list)  # of each text; source None: the columns'

    def place(self, text: str) -> str:
        """Return a text with a sentinel for each medium."""
        if has_sentinels(text):
            raise UnusableRow("a text has a character that Unicode reserves (U+FDD0, U+FDD1 or U+FDD4): remove it")
        places: list[tuple[MediaKind, Json]] = []
        self.places.append(places)

        def replace(match: re.Match[str]) -> str:
            if match["block"]:
                if int(match["block"]) >= len(self.blocks):
                    raise UnusableRow("a text has a character that Unicode reserves (U+FDD2): remove it")
                places.append(self.blocks[int(match["block"])])
            else:
                kind: MediaKind = next(kind for kind in SENTINELS if match[kind] or match["tag"] == kind)
                places.append((kind, match[kind]))
            return SENTINELS[places[-1][0]]

        return TAG.sub(replace, text)

    def media(self, first: int, limits: JsonObject) -> tuple[str, list[Medium]]:
        """Return the sentinels to put before text `first`, and all media in order."""
        before: list[tuple[MediaKind, Json]] = []
        for kind, sources in self.columns.items():
            tags = sum(tag == kind and source is None for places in self.places for tag, source in places)
            if tags > len(sources):
                raise UnusableRow(f"it has more <{kind}> tags than {kind}s")
            before.extend((kind, None) for _ in range(len(sources) - tags))
        self.places[first][:0] = before
        sources = {kind: iter(sources) for kind, sources in self.columns.items()}
        media = [
            Medium(kind, next(sources[kind]) if source is None else source, limits)
            for places in self.places
            for kind, source in places
        ]
        return "".join(SENTINELS[kind] for kind, _ in before), media


def split_media(row: JsonObject, sides: Sequence[str] = ()) -> MediaRow:
    """Separate a row's media from its texts. sides: those of SIDES whose columns the task reads"""
    row = type(row)(row)
    columns: dict[MediaKind, Sequence[Json]] = {
        kind: [source for name in names for source in _sources(row, name)] for kind, names in COLUMNS.items()
    }
    side_columns: dict[str, dict[MediaKind, Sequence[Json]]] = {side: {} for side in sides}
    for side in sides:
        for kind in COLUMNS:
            if sources := _sources(row, f"{side}_{kind}s"):
                side_columns[side][kind] = sources
    media_columns = {*chain.from_iterable(COLUMNS.values()), *(f"{side}_{kind}s" for side in sides for kind in COLUMNS)}
    for column in MEDIA:
        if row.pop(column, None) and column not in media_columns:
            raise UnusableRow(f"it has {column}, which this task does not read")
    blocks: list[tuple[MediaKind, Json]] = []
    for name in (*JSON_MESSAGES, *ANSWERS):
        if name in row:
            messages = row[name]
            with suppress(ValueError, RecursionError):  # refused later, with a reason
                if name in JSON_MESSAGES and isinstance(messages, str) and '"type"' in messages:
                    messages = json.loads(messages)
            if isinstance(messages, list | dict):
                row[name] = _with_tags(messages, blocks)
    kwargs = template_kwargs(drop_missing(row))
    limits = {name: _number(kwargs[name], name) for name in LIMITS if kwargs.get(name) is not None}
    return MediaRow(row, columns, blocks, _objects(row.pop("objects", None)), limits, side_columns)


def has_media(row: JsonObject) -> bool:
    """Return whether a row has images, videos or audio, in columns or blocks."""
    if any(row.get(column) for column in MEDIA):
        return True
    return any(
        isinstance(block, dict) and block.get("type") in BLOCKS
        for name in STRUCTURED
        if isinstance(messages := row.get(name), list)
        for message in messages
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for block in content
    )


def open_tags(text: str) -> list[MediaKind]:
    """Return the kinds of the tags in a text that name no file."""
    tags = [match["tag"] for match in TAG.finditer(text)]
    return [kind for tag in tags for kind in SENTINELS if kind == tag]


def to_media_conversation(
    row: JsonObject, *, answered: bool = True, strict: bool = True
) -> tuple[Conversation, JsonObject | None]:
    """Return the conversation of a row, with its media, and its objects. answered, strict: as in `to_conversation`"""
    media_row = split_media(row)
    conversation = to_conversation(media_row.row, answered=answered, strict=strict)
    media_row.place_in(conversation)
    return conversation, media_row.objects


def to_media_text(row: JsonObject) -> tuple[str, list[Medium]]:
    """Return the text of a row for pre-training, with its media."""
    media_row = split_media(row)
    if media_row.objects:
        raise UnusableRow("it has objects, which are for conversations: use megatron sft")
    [text], media = media_row.place([to_text(media_row.row)], 0, media_row.columns)
    return text, media


def _sources(row: JsonObject, column: str) -> Sequence[Json]:
    """Return the media of a column: a list, one alone, or a list as JSON (CSV)."""
    value = row.get(column)
    if isinstance(value, str) and value.startswith("["):
        value = parse_json(value, column)
    if value is None or value in ("", []):
        return []
    sources = value if isinstance(value, list) else [value]
    if any(source is None or source == "" for source in sources):
        raise UnusableRow(f"its {column} has an empty value")
    return sources


def _with_tags(message: Json, blocks: list[tuple[MediaKind, Json]]) -> Json:
    """Return a message, or each of a list, whose blocks are text with tags. Appends the media of blocks to `blocks`."""
    if isinstance(message, list):
        return [_with_tags(item, blocks) for item in message]
    if not isinstance(message, dict):
        return message
    key = next((key for key in ("content", "value") if isinstance(message.get(key), list)), None)
    if key is None:
        return message
    if not any(isinstance(block, dict) and block.get("type") in BLOCKS for block in message[key]):
        return message
    parts = []
    for block in message[key]:
        kind = BLOCKS.get(str(block.get("type"))) if isinstance(block, dict) else None
        if kind is None:
            is_text = isinstance(block, dict) and block.get("type") == "text"
            if not is_text:
                name = block.get("type") if isinstance(block, dict) else type(block).__name__
                raise UnusableRow(f"a message has {str(name)[:40]} content; text and media are expected")
            parts.append(require_string(block.get("text"), "text"))
            continue
        blocks.append((kind, _source_of_block(block)))
        parts.append(f"{OPEN}{len(blocks) - 1}{CLOSE}")
    return {**message, key: "".join(parts)}


def _source_of_block(block: JsonObject) -> Json:
    """Return the source of a media block; None if it stands for the next medium of the columns."""
    keys = block["type"], "image_url", "audio_url", *SENTINELS, "source", "url", "path"
    values = (block.get(key) for key in keys)
    value = next((value for value in values if value is not None), None)
    if not isinstance(value, dict) or value.get("bytes") is not None or value.get("path") is not None:
        return value
    if isinstance(data := value.get("data"), str):  # Anthropic's, and OpenAI's of audios
        if data[:5].lower() in ("data:", "http:", "https"):
            return data
        return f"data:{value.get('media_type', '')};base64,{data}"
    if isinstance(url := value.get("url"), str):
        return url
    raise UnusableRow(f"a message has a block of the type {block['type']} without an image, video or audio")


def _objects(value: Json) -> JsonObject | None:
    objects = parse_json(value, "objects")
    if objects is None:
        return None
    if not isinstance(objects, dict):
        raise UnusableRow('its objects are not an object of lists, as in {"ref": [...], "bbox": [...]}')
    return objects if objects.get("ref") or objects.get("bbox") else None


def _number(value: Json, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UnusableRow(f"its chat_template_kwargs set {name}, which is no number above 0")
    return value
