"""Literals that mark the assistant's turns in a chat template's text, learned from probe conversations."""

import json
import re
from dataclasses import dataclass
from typing import Protocol

from ..formats.schemas import UnusableRow
from ..json_types import JsonObject
from ..tokenizer import Tokenizer

PROBE = [
    {"role": role, "content": f"xx{role}{n}xx"} for n in (1, 2) for role in ("user", "assistant")
]  # words that no template changes
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
Spans = list[tuple[int, int]]  # [start, end) in characters


@dataclass(frozen=True)
class AssistantMarkers:
    """Literals around an assistant turn."""

    header: str  # starts an assistant turn
    prompt: str  # generation prompt: the header, and the start of the answer that the template writes
    ends: tuple[str, ...]  # end a turn; the first occurrence counts
    opener: str  # starts a turn of any role; no turn contains it
    # Tokens that start the next turn and also end this one, after an answer and after calls; "": none or unknown.
    closers: tuple[str, str] = ("", "")

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.ends, self.opener, self.header)


class Render(Protocol):
    """Function that renders messages to text, with the generation prompt if `prompt`. Raises UnusableRow."""

    def __call__(self, messages: list[JsonObject], prompt: bool = False) -> str: ...


def special_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern of the tokenizer's added and special tokens."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    return re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)) or "(?!)")


def learn_markers(render: Render, special: re.Pattern[str], bos: str | None) -> AssistantMarkers | None:
    """Return the markers of a template, or None if it does not mark turns by literals.

    special: pattern of the tokenizer's added tokens
    Raises UnusableRow if the template refuses a plain conversation.
    """
    text = render(PROBE)
    words = [message["content"] for message in PROBE]
    if any(text.count(word) != 1 for word in words):
        return None
    call_end, call_closer = _learn_calls(render, special)
    closers = ("", "")
    if not special.search(text, text.index(words[3])):
        separator = special.match(text[text.index(words[1]) + len(words[1]) : text.index(words[2])].lstrip())
        if not separator or separator.group() == bos or text.find(separator.group()) > text.index(words[0]):
            return None
        closers, call_end = (separator.group(), call_closer), ""
        text += closers[0]
    prompts, headers, ends = [], [], [call_end, closers[1]]
    for turn in (1, 3):
        prompted = render(PROBE[:turn], prompt=True)
        # Some templates add an end token to everything but a prompt (Phi-3).
        context = _common_prefix(render(PROBE[:turn]), prompted)
        start, stop = text.index(words[turn]), text.index(words[turn]) + len(words[turn])
        end = special.search(text, stop)
        if not (text.startswith(context) and words[turn - 1] in context and end):
            return None
        prompts.append(prompted[len(context) :])
        headers.append(_common_tokens(text[len(context) : start], prompts[-1], special))
        ends.append(text[stop : end.end()])
    header = _common_prefix(*headers)
    if not header or prompts[0] != prompts[1]:
        return None
    opener = special.match(header)
    ends = tuple(dict.fromkeys(filter(None, ends)))
    return AssistantMarkers(header, prompts[0], ends, opener.group() if opener else header, closers)


def _learn_calls(render: Render, special: re.Pattern[str]) -> tuple[str, str]:
    """Return the tokens that end a turn of tool calls and start their results; "" if the template renders none."""
    for calls in (CALLS, CALLS[:1]):  # some templates refuse two calls
        messages = [PROBE[0], {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            text = render(messages)
        except UnusableRow:
            continue
        call_positions = [text.index(mark) for n in range(len(calls)) if (mark := f"xxcall{n}xx") in text]
        if not call_positions:
            continue
        specials = [match.group() for match in special.finditer(text, call_positions[-1])]
        end = specials[-1] if specials else ""
        if text.count(end, call_positions[0]) > 1:  # it ends each call, not the turn
            end = ""
        try:
            with_results = render([*messages, *RESULTS[: len(calls)]])
        except UnusableRow:
            return end, ""
        closer = special.match(with_results.removeprefix(text.rstrip()).lstrip())
        return end, closer.group() if closer else ""
    return "", ""


def merge_adjacent(turns: Spans, text: str, header: str) -> Spans:
    """Merge adjacent turns: gpt-oss writes a header before the thought and another before the answer."""
    merged: Spans = []
    for start, end in turns:
        if merged and text.startswith(header, merged[-1][1]):
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged


def format_calls(messages: list[JsonObject], as_text: bool, null_content: bool) -> list[JsonObject]:
    """Return messages with tool calls in the form that a template takes.

    as_text: arguments are JSON text, not a dict
    null_content: empty content of a message with calls is None
    """
    formatted = []
    for message in messages:
        if calls := message.get("tool_calls"):
            if as_text:
                calls = [{**call, "function": _dump_arguments(call["function"])} for call in calls]
            content = message["content"]
            message = {**message, "content": None if null_content and not content else content, "tool_calls": calls}
        formatted.append(message)
    return formatted


def _dump_arguments(function: JsonObject) -> JsonObject:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _common_prefix(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _common_tokens(a: str, b: str, special: re.Pattern[str]) -> str:
    """Return the common prefix without parts of special tokens, such as the `<` of `<think>` and `</think>`."""
    common = _common_prefix(a, b)
    for text in (a, b):
        for match in special.finditer(text):
            if match.start() < len(common) < match.end():
                common = common[: match.start()]
    return common
