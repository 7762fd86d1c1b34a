"""Messages that tools and schedulers send to the model, with images."""

import io
from collections.abc import Iterable
from typing import Any

from ..json_types import Json, JsonObject
from .media_rows import has_media, split_media
from .medium import SENTINELS, Medium, is_picture, json_source, to_blocks
from .schemas import MEDIA, UnusableRow, from_messages


def to_replies(messages: Iterable[JsonObject]) -> list[JsonObject]:
    """Return messages that a tool or scheduler sends, in the form of rows.

    Those with images, in content blocks or in `images`, have content blocks whose sources are JSON. Raises UnusableRow.
    """
    replies: list[JsonObject] = []
    for message in messages:
        media = {name: message[name] for name in MEDIA if name in message}
        text_message = {name: value for name, value in message.items() if name not in MEDIA}
        if not has_media({"messages": [text_message], **media}):
            replies += from_messages([text_message]).messages
            continue
        media_row = split_media({"messages": [text_message], **media})
        [reply] = from_messages(media_row.row["messages"]).messages
        [content], placed = media_row.place([reply["content"]], 0, media_row.columns)
        sources = (_reply_source(medium) for medium in placed)
        blocks = to_blocks(content)
        reply["content"] = [block if block["type"] == "text" else block | {"image": next(sources)} for block in blocks]
        replies.append(reply)
    return replies


def split_replies(replies: Iterable[JsonObject]) -> tuple[list[JsonObject], list[Medium]]:
    """Return the messages of `to_replies` with a sentinel for each image, and the images."""
    messages, media = [], list[Medium]()
    for reply in replies:
        if isinstance(blocks := reply["content"], list):
            media += [Medium("image", block["image"]) for block in blocks if block["type"] == "image"]
            reply = reply | {"content": "".join(block.get("text", SENTINELS["image"]) for block in blocks)}
        messages.append(reply)
    return messages, media


def _reply_source(medium: Medium) -> Json:
    """Return an image's source as JSON; a picture of PIL as data."""
    source: Any = medium.source
    if medium.kind != "image":
        raise UnusableRow(f"it has {medium.kind}s, where texts and images are expected")
    if is_picture(source):
        file = io.BytesIO()
        source.save(file, "PNG")
        source = file.getvalue()
    if (source := json_source(source)) is None:
        raise UnusableRow("it has an image that is no path, URL, data or picture")
    return source
