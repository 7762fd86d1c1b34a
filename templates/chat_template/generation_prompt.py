"""Answer prefixes: text that a chat template's generation prompt adds after the assistant's header."""

from collections.abc import Sequence

from ..formats.schemas import Conversation, with_columns
from ..json_types import Json, JsonObject
from ..tokenizer import Tokenizer
from .chat import ChatTemplate


class GenerationPrompts:
    """Function that returns a chat template's answer prefix. Arguments as in `Continuation`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: list[JsonObject] | None = None,
        **template_kwargs: Json,
    ):
        self._tokenizer, self._tools = tokenizer, tools
        self._template = ChatTemplate(tokenizer, **template_kwargs)

    def __call__(self, columns: JsonObject, before: Sequence[int]) -> str:
        """Return the prefix of an answer, without special tokens; "" if it is blank.

        columns: of the row
        before: tokens before the answer
        """
        probe = with_columns(Conversation([{"role": "user", "content": ""}], [None]), columns | {"system": None})
        probe.tools = probe.tools or self._tools
        prefix = self._template.answer_prefix(probe)
        # Some templates omit it after a tool result. The slice is long enough: a token has at least one byte.
        if not prefix or not self._tokenizer.decode(before[-len(prefix.encode()) :]).endswith(prefix):
            return ""
        tokens = self._tokenizer.encode(prefix, add_special_tokens=False)
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text if text.strip() else ""
