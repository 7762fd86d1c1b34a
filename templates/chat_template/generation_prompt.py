"""How an answer begins that a model goes on with: what a chat template's generation prompt adds behind the header."""

from collections.abc import Sequence
from typing import Any

from ..formats.schemas import Conversation, with_columns
from .chat import ChatTemplate


class Openings:
    """The openings of a tokenizer's chat template. Arguments: as of Continuation."""

    def __init__(self, tokenizer: Any, *, tools: list[dict] | None = None, **template_kwargs: Any):
        self._tokenizer, self._tools = tokenizer, tools
        self._template = ChatTemplate(tokenizer, **template_kwargs)

    def __call__(self, columns: dict[str, Any], before: Sequence[int]) -> str:
        """Of an answer behind these tokens, without special tokens; the ends of lines alone are none. `columns`: of
        the row."""
        asked = with_columns(Conversation([{"role": "user", "content": ""}], [None]), columns | {"system": None})
        asked.tools = asked.tools or self._tools
        opening = self._template.opening(asked)
        # Some templates leave it out behind the result of a tool. A token has a byte or more.
        if not opening or not self._tokenizer.decode(before[-len(opening.encode()) :]).endswith(opening):
            return ""
        tokens = self._tokenizer.encode(opening, add_special_tokens=False)
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text if text.strip() else ""
