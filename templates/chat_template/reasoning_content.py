"""What chat templates leave out of a turn though it is to be learned: the thought before an answer, and calls."""

import re
from collections import Counter
from typing import Any

OPENING = re.compile(r"[<\[][\w:]*think\w*[>\]]", re.IGNORECASE)  # where one begins: <think>, [THINK], <seed:think>
CLOSING = re.compile(r"[<\[]/[\w:]*think\w*[>\]]", re.IGNORECASE)
GIVEN = ("reasoning_content", "thinking")  # keys of a message that hold one


def thought_of(message: dict[str, Any]) -> str:
    """The thought of a message, given by a key or in its content between tags ("": none)."""
    if given := _given(message):
        return given.strip()
    content = message["content"]
    closing = CLOSING.search(content)
    return OPENING.split(content[: closing.start()])[-1].strip() if closing else ""


def with_thought(message: dict[str, Any], opening: str) -> str | None:
    """The content with its thought, behind `opening`, with which the generation prompt opens thoughts ("": it does
    not). None where nothing says how the model writes one."""
    content, tag = message["content"], OPENING.search(opening)
    if given := _given(message):
        if not tag:
            return None
        closing = f"{tag.group()[0]}/{tag.group()[1:]}"
        return f"{opening}{given.strip()}\n{closing}\n\n{content.lstrip()}"
    if not tag:
        return content
    written = OPENING.search(content)
    return opening + (content[written.end() :] if written else content).lstrip("\n")


def without_thought(message: dict[str, Any], content: str) -> dict[str, Any]:
    """The message with this content and no thought beside it."""
    return {key: value for key, value in message.items() if key not in GIVEN} | {"content": content}


def is_shut(text: str) -> bool:
    """Whether it is the tags of an empty thought, or the end of one."""
    return bool(CLOSING.search(text)) and not CLOSING.sub("", OPENING.sub("", text)).strip()


def shows_calls(text: str, message: dict[str, Any]) -> bool:
    """Whether the text has the name of each call of the message, as often as it is called."""
    names = Counter(call["function"]["name"] for call in message.get("tool_calls") or [])
    return all(text.count(name) >= count for name, count in names.items())


def _given(message: dict[str, Any]) -> str:
    return next((message[key] for key in GIVEN if message.get(key)), "")
