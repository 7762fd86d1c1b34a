"""Thoughts and tool calls of messages, which some chat templates omit although the model must learn them."""

import re
from collections import Counter

from ..json_types import JsonObject

OPENING = re.compile(r"[<\[][\w:]*think\w*[>\]]", re.IGNORECASE)  # opens a thought: <think>, [THINK], <seed:think>
CLOSING = re.compile(r"[<\[]/[\w:]*think\w*[>\]]", re.IGNORECASE)
KEYS = ("reasoning_content", "thinking")  # keys of a message that hold a thought


def thought_of(message: JsonObject) -> str:
    """Return the thought of a message, from a key or between tags in its content; "" without one."""
    if thought := _separate_thought(message):
        return thought.strip()
    content = message["content"]
    closing = CLOSING.search(content)
    return OPENING.split(content[: closing.start()])[-1].strip() if closing else ""


def with_thought(message: JsonObject, prefix: str) -> str | None:
    """Return the content with its thought, or None if the model's form of a thought is unknown.

    prefix: text with which the generation prompt starts a thought; "" if it does not
    """
    content, tag = message["content"], OPENING.search(prefix)
    if thought := _separate_thought(message):
        if not tag:
            return None
        closing = f"{tag.group()[0]}/{tag.group()[1:]}"
        return f"{prefix}{thought.strip()}\n{closing}\n\n{content.lstrip()}"
    if not tag:
        return content
    opening = OPENING.search(content)
    return prefix + (content[opening.end() :] if opening else content).lstrip("\n")


def without_thought(message: JsonObject, content: str) -> JsonObject:
    """Return the message with this content, and without keys that hold a thought."""
    return {key: value for key, value in message.items() if key not in KEYS} | {"content": content}


def is_closed(text: str) -> bool:
    """Return whether text consists of the tags of an empty thought, or of a closing tag."""
    return bool(CLOSING.search(text)) and not CLOSING.sub("", OPENING.sub("", text)).strip()


def shows_calls(text: str, message: JsonObject) -> bool:
    """Return whether text contains the name of each tool call of the message, as often as the message calls it."""
    names = Counter(call["function"]["name"] for call in message.get("tool_calls") or [])
    return all(text.count(name) >= count for name, count in names.items())


def _separate_thought(message: JsonObject) -> str:
    return next((message[key] for key in KEYS if message.get(key)), "")
