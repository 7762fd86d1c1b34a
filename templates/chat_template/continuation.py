"""A conversation that goes on: the tokens that a chat template puts between an answer of the model and its next one.

What the model has said stays as it was drawn, so that the conversation is not rendered anew: messages are rendered
behind a short conversation of known words, and what the template adds behind its answer is theirs. A template that
changes earlier turns (Qwen3's takes out their thinking) changes only the words.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from ..formats.schemas import Conversation, UnusableRow, with_columns
from .chat import ChatTemplate

SAID = "xxassistantxx"
ASKED = {"role": "user", "content": "xxuserxx"}


class Continuation:
    """The tokens between two answers.

    Arguments:
        tokenizer: with a chat template, and a fast version
        ends: tokens by which the model ends an answer
        tools: of rows that have no column `tools`
        template_kwargs: of the chat template, as rows' prompts are given them
    """

    def __init__(
        self, tokenizer: Any, ends: Collection[int], *, tools: list[dict] | None = None, **template_kwargs: Any
    ):
        self._tokenizer, self._ends, self._tools = tokenizer, set(ends), tools
        self._template = ChatTemplate(tokenizer, **template_kwargs)
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self._special = re.compile("|".join(re.escape(t) for t in sorted(added, key=len, reverse=True)) or "(?!)")

    def __call__(self, messages: Sequence[dict[str, Any]], columns: dict[str, Any], answer: Sequence[int]) -> list[int]:
        """Behind `answer`, the model's last one: the end of its turn where it has not drawn it, `messages`, and the
        generation prompt. `columns`: of the row. Raises UnusableRow where the template refuses the messages."""
        last = answer[-1] if len(answer) else None
        closing, tail = self._parts(list(messages), columns)
        found = self._tokenizer(closing + tail, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = found["input_ids"]
        if closing and last in self._ends:
            return [
                token for token, (start, _) in zip(ids, found["offset_mapping"], strict=True) if start >= len(closing)
            ]
        # Some models end their turn by the token that opens the next one (GLM-4's <|user|>).
        return ids[1:] if not closing and ids[:1] == [last] else ids

    def _parts(self, messages: list[dict[str, Any]], columns: dict[str, Any]) -> tuple[str, str]:
        """The special token that ends a turn (none: no token does), and the text from there on."""
        refused: UnusableRow | None = None
        for said, mark in self._probes(messages):
            # As the rows' own prompts, but for the messages.
            probe = with_columns(Conversation([ASKED, said], [None, None]), columns | {"system": None})
            probe.tools = probe.tools or self._tools
            try:
                alone = self._template.text(probe)
                whole = self._template.text(probe, messages=[*probe.messages, *messages], prompt=True)
            except UnusableRow as error:
                refused = refused or error
                continue
            if mark not in alone or mark not in whole:
                continue
            alone, whole = (text[text.index(mark) + len(mark) :] for text in (alone, whole))
            count = sum(1 for _ in self._special.finditer(alone))  # a call has special tokens of its own
            if not count:
                return "", whole.removeprefix(alone.rstrip())
            found = [special for special, _ in zip(self._special.finditer(whole), range(count), strict=False)]
            if len(found) == count:
                return found[-1].group(), whole[found[-1].end() :]
        raise refused or UnusableRow("the chat template does not show where an answer ends")

    @staticmethod
    def _probes(messages: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
        """Answers to put the messages behind, with the last word of each. Some templates want calls before results."""
        said = {"role": "assistant", "content": SAID}
        results = next((n for n, message in enumerate(messages) if message["role"] != "tool"), len(messages))
        if not results:
            return [(said, SAID)]
        calls = [
            {
                "type": "function",
                "id": message.get("tool_call_id") or f"call{number:05d}",
                "function": {"name": message.get("name") or "tool", "arguments": {"xx": f"xxcall{number}xx"}},
            }
            for number, message in enumerate(messages[:results])
        ]
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        return [(called, f"xxcall{results - 1}xx"), (said, SAID)]
