"""Completions as text, for reward functions and users."""

from collections.abc import Sequence
from typing import Any

from ...templates.chat_template.generation_prompt import GenerationPrompts
from ..multi_turn.load import prompt_tools
from ..options import GrpoOptions
from ..rollout.engine import Completion
from ..run.context import Run


class Texts:
    """The text of an answer begins where the assistant's turn begins: with what the chat template has put before the
    first token that the model drew (`<think>`, of some), as a conversation would have it. Special tokens are left out.
    """

    def __init__(self, run: Run, options: GrpoOptions):
        self._tokenizer, thinking = run.tokenizer, options.data.enable_thinking
        more = {} if thinking is None else {"enable_thinking": thinking}
        self._openings = GenerationPrompts(run.tokenizer, tools=prompt_tools(options), **more)

    def __call__(
        self, columns: Sequence[dict[str, Any]], before: Sequence[Sequence[int]], drawn: Sequence[Completion]
    ) -> list[str]:
        """Return the texts of completions, from the columns of their rows and the tokens before them."""
        texts = self._tokenizer.batch_decode([each.tokens for each in drawn], skip_special_tokens=True)
        rows = zip(columns, before, texts, strict=True)
        return [self._openings(of_row, tokens) + text for of_row, tokens, text in rows]
