"""The literals by which a chat template marks what the assistant says, learned from conversations of known words."""

import json
import re
from dataclasses import dataclass
from typing import Any, Protocol

from ..formats.schemas import UnusableRow

PROBE = [
    {"role": role, "content": f"xx{role}{n}xx"} for n in (1, 2) for role in ("user", "assistant")
]  # words that no template touches
CALLS = [
    {
        "type": "function",
        "id": f"call{n:05d}",
        "function": {"name": f"xxname{n}xx", "arguments": {"xx": f"xxcall{n}xx"}},
    }
    for n in range(2)
]
RESULTS = [
    {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": "xxresultxx"}
    for call in CALLS
]
Turns = list[tuple[int, int]]  # [start, end) in characters


@dataclass(frozen=True)
class Dialect:
    """The literals around what the assistant says."""

    header: str  # opens each turn of the assistant
    prompt: str  # the generation prompt: the header, and what the template adds for the model to continue from
    ends: tuple[str, ...]  # close a turn; the first to come counts
    opener: str  # opens a turn of anyone: none is inside a turn
    # Where no token of its own ends a turn, those that open the next: behind an answer, and behind calls ("": unknown).
    closers: tuple[str, str] = ("", "")

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.ends, self.opener, self.header)


class Render(Protocol):
    """Messages as text; `prompt` adds the generation prompt. Raises UnusableRow where the template refuses them."""

    def __call__(self, messages: list[dict], prompt: bool = False) -> str: ...


def learn(render: Render, special: re.Pattern[str], bos: str | None) -> Dialect | None:
    """The literals. None where the template does not work by literals. `special`: finds the tokenizer's added tokens.

    Raises UnusableRow where the template refuses a plain conversation.
    """
    text = render(PROBE)
    words = [message["content"] for message in PROBE]
    if any(text.count(word) != 1 for word in words):
        return None
    call_end, call_closer = _learn_calls(render, special)
    closers = ("", "")
    if not special.search(text, text.index(words[3])):
        gap = special.match(text[text.index(words[1]) + len(words[1]) : text.index(words[2])].lstrip())
        if not gap or gap.group() == bos or text.find(gap.group()) > text.index(words[0]):
            return None
        closers, call_end = (gap.group(), call_closer), ""
        text += closers[0]
    prompts, headers, ends = [], [], [call_end, closers[1]]
    for turn in (1, 3):
        prompted = render(PROBE[:turn], prompt=True)
        # Some templates end all but a prompt by a token more (Phi-3).
        before = _common_prefix(render(PROBE[:turn]), prompted)
        start, stop = text.index(words[turn]), text.index(words[turn]) + len(words[turn])
        end = special.search(text, stop)
        if not (text.startswith(before) and words[turn - 1] in before and end):
            return None
        prompts.append(prompted[len(before) :])
        headers.append(_common_tokens(text[len(before) : start], prompts[-1], special))
        ends.append(text[stop : end.end()])
    header = _common_prefix(*headers)
    if not header or prompts[0] != prompts[1]:
        return None
    opener = special.match(header)
    ends = tuple(dict.fromkeys(filter(None, ends)))
    return Dialect(header, prompts[0], ends, opener.group() if opener else header, closers)


def _learn_calls(render: Render, special: re.Pattern[str]) -> tuple[str, str]:
    """The token that ends a turn of calls, and the one that opens their results behind it ("": not shown)."""
    for calls in (CALLS, CALLS[:1]):  # some templates refuse two
        called = [PROBE[0], {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            text = render(called)
        except UnusableRow:
            continue
        shown = [text.index(mark) for n in range(len(calls)) if (mark := f"xxcall{n}xx") in text]
        if not shown:
            continue
        specials = [found.group() for found in special.finditer(text, shown[-1])]
        end = specials[-1] if specials else ""
        if text.count(end, shown[0]) > 1:  # it ends each call
            end = ""
        try:
            whole = render([*called, *RESULTS[: len(calls)]])
        except UnusableRow:
            return end, ""
        closer = special.match(whole.removeprefix(text.rstrip()).lstrip())
        return end, closer.group() if closer else ""
    return "", ""


def joined(turns: Turns, text: str, header: str) -> Turns:
    """Turns of which one begins right behind another as one: gpt-oss's thought and answer have a header each."""
    found: Turns = []
    for start, end in turns:
        if found and text.startswith(header, found[-1][1]):
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


def with_calls_as(messages: list[dict], as_text: bool, absent: bool) -> list[dict]:
    """The messages with their calls in a form that the template takes: whether arguments are JSON, not a dict, and
    whether an empty content beside calls is None."""
    formed = []
    for message in messages:
        if calls := message.get("tool_calls"):
            if as_text:
                calls = [{**call, "function": _as_text(call["function"])} for call in calls]
            content = message["content"]
            message = {**message, "content": None if absent and not content else content, "tool_calls": calls}
        formed.append(message)
    return formed


def _as_text(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _common_prefix(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _common_tokens(a: str, b: str, special: re.Pattern[str]) -> str:
    """The common prefix, with no part of a special token: `<` is none of `<think>` and `</think>`."""
    common = _common_prefix(a, b)
    for text in (a, b):
        for found in special.finditer(text):
            if found.start() < len(common) < found.end():
                common = common[: found.start()]
    return common
