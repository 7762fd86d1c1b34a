"""Continuation of a conversation: the tokens of the chat template between two answers of the model.

The sampled tokens must not change, so the conversation is not rendered again. Messages are rendered after a short
conversation of placeholders, and the text after its answer is tokenized. A template that changes earlier turns (Qwen3's
removes their thinking) changes only the placeholders.
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
    """Function that returns the tokens between two answers.

    Arguments:
        tokenizer: a fast tokenizer, with a chat template
        ends: tokens with which the model ends an answer
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
        """Return the tokens after the model's `answer`: the end of its turn if missing, `messages`, generation prompt.

        columns: of the row
        Raises UnusableRow if the template refuses the messages.
        """
        last = answer[-1] if len(answer) else None
        closing, tail = self._closing_and_tail(list(messages), columns)
        encoding = self._tokenizer(closing + tail, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoding["input_ids"]
        if closing and last in self._ends:
            offsets = encoding["offset_mapping"]
            return [token for token, (start, _) in zip(ids, offsets, strict=True) if start >= len(closing)]
        # Some models end their turn with the token that starts the next one (GLM-4's <|user|>).
        return ids[1:] if not closing and ids[:1] == [last] else ids

    def _closing_and_tail(self, messages: list[JsonObject], columns: JsonObject) -> tuple[str, str]:
        """Return the special token that ends a turn ("" without one), and the text after it."""
        refusal: UnusableRow | None = None
        for answer, last_word in self._probes(messages):
            # Tools and template arguments are those of the row's prompt.
            probe = with_columns(Conversation([QUESTION, answer], [None, None]), columns | {"system": None})
            probe.tools = probe.tools or self._tools
            try:
                answer_text = self._template.render(probe)
                full_text = self._template.render(probe, messages=[*probe.messages, *messages], prompt=True)
            except UnusableRow as error:
                refusal = refusal or error
                continue
            if last_word not in answer_text or last_word not in full_text:
                continue
            answer_text, full_text = (
                text[text.index(last_word) + len(last_word) :] for text in (answer_text, full_text)
            )
            count = sum(1 for _ in self._special.finditer(answer_text))  # a call contains special tokens
            if not count:
                return "", full_text.removeprefix(answer_text.rstrip())
            specials = [special for special, _ in zip(self._special.finditer(full_text), range(count), strict=False)]
            if len(specials) == count:
                return specials[-1].group(), full_text[specials[-1].end() :]
        raise refusal or UnusableRow("the chat template does not show where an answer ends")

    @staticmethod
    def _probes(messages: list[JsonObject]) -> list[tuple[JsonObject, str]]:
        """Return answers to render before the messages, each with its last word.

        Some templates require tool calls before tool results.
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
