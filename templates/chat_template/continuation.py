"""Continuation of a conversation: the tokens of the chat template between two answers of the model.

The model's tokens stay as they were sampled, so the conversation is not rendered anew: messages are rendered after a
short conversation of placeholder words, and all that follows its answer is theirs. A template that changes earlier
turns (Qwen3's removes their thinking) changes the placeholders only.
"""

from collections.abc import Collection, Sequence

from ..formats.schemas import Conversation, UnusableRow, with_columns
from ..json_types import Json, JsonObject
from ..tokenizer import Tokenizer
from .assistant_markers import special_tokens
from .chat import ChatTemplate

ANSWER = "xxassistantxx"
QUESTION = {"role": "user", "content": "xxuserxx"}


class Continuation:
    """Tokens between two answers.

    Arguments:
        tokenizer: a fast one, with a chat template
        ends: tokens by which the model ends an answer
        tools: for rows without a column `tools`
        template_kwargs: arguments of the chat template, as for the rows' prompts
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ends: Collection[int],
        *,
        tools: list[JsonObject] | None = None,
        **template_kwargs: Json,
    ):
        self._tokenizer, self._ends, self._tools = tokenizer, set(ends), tools
        self._template = ChatTemplate(tokenizer, **template_kwargs)
        self._special = special_tokens(tokenizer)

    def __call__(self, messages: Sequence[JsonObject], columns: JsonObject, answer: Sequence[int]) -> list[int]:
        """Return the tokens after the model's last `answer`: the end of its turn if it lacks one, `messages`, prompt.

        columns: of the row
        Raises UnusableRow if the template refuses the messages.
        """
        last = answer[-1] if len(answer) else None
        closing, tail = self._parts(list(messages), columns)
        encoding = self._tokenizer(closing + tail, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoding["input_ids"]
        if closing and last in self._ends:
            offsets = encoding["offset_mapping"]
            return [token for token, (start, _) in zip(ids, offsets, strict=True) if start >= len(closing)]
        # Some models end their turn by the token that opens the next one (GLM-4's <|user|>).
        return ids[1:] if not closing and ids[:1] == [last] else ids

    def _parts(self, messages: list[JsonObject], columns: JsonObject) -> tuple[str, str]:
        """Return the special token that ends a turn ("" without one), and the text that follows it."""
        refusal: UnusableRow | None = None
        for answer, mark in self._probes(messages):
            # All but the messages is as in the row's own prompt.
            probe = with_columns(Conversation([QUESTION, answer], [None, None]), columns | {"system": None})
            probe.tools = probe.tools or self._tools
            try:
                alone = self._template.render(probe)
                full = self._template.render(probe, messages=[*probe.messages, *messages], prompt=True)
            except UnusableRow as error:
                refusal = refusal or error
                continue
            if mark not in alone or mark not in full:
                continue
            alone, full = (text[text.index(mark) + len(mark) :] for text in (alone, full))
            count = sum(1 for _ in self._special.finditer(alone))  # a call has special tokens of its own
            if not count:
                return "", full.removeprefix(alone.rstrip())
            specials = [special for special, _ in zip(self._special.finditer(full), range(count), strict=False)]
            if len(specials) == count:
                return specials[-1].group(), full[specials[-1].end() :]
        raise refusal or UnusableRow("the chat template does not show where an answer ends")

    @staticmethod
    def _probes(messages: list[JsonObject]) -> list[tuple[JsonObject, str]]:
        """Return answers to render before the messages, each with its last word.

        Some templates require tool calls before results.
        """
        plain = {"role": "assistant", "content": ANSWER}, ANSWER
        results = next((n for n, message in enumerate(messages) if message["role"] != "tool"), len(messages))
        if not results:
            return [plain]
        calls = [
            {
                "type": "function",
                "id": message.get("tool_call_id") or f"call{number:05d}",
                "function": {"name": message.get("name") or "tool", "arguments": {"xx": f"xxcall{number}xx"}},
            }
            for number, message in enumerate(messages[:results])
        ]
        with_calls = {"role": "assistant", "content": "", "tool_calls": calls}
        return [(with_calls, f"xxcall{results - 1}xx"), plain]
