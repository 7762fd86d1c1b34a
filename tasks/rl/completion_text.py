"""Completions as text, for reward functions and users."""

from collections.abc import Sequence
from typing import Any

from ...templates.chat_template.generation_prompt import GenerationPrompts
from ..multi_turn.load import prompt_tools
from ..options import GkdOptions, GrpoOptions
from ..rollout.engine import Completion
from ..run.context import Run


class CompletionTexts:
    """Decoder of completions, without special tokens.

    A text starts with the prefix that the generation prompt adds after the assistant's header, such as `<think>`.
    """

    def __init__(self, run: Run, options: GrpoOptions | GkdOptions):
        self._tokenizer, thinking = run.tokenizer, options.data.enable_thinking
        settings = {} if thinking is None else {"enable_thinking": thinking}
        self._answer_prefixes = GenerationPrompts(run.tokenizer, tools=prompt_tools(options), **settings)

    def __call__(
        self, columns: Sequence[dict[str, Any]], prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
    ) -> list[str]:
        """Return the texts of completions, given the columns of their rows and the tokens of their prompts."""
        texts = self._tokenizer.batch_decode(
            [completion.tokens for completion in completions], skip_special_tokens=True
        )
        rows = zip(columns, prompts, texts, strict=True)
        return [self._answer_prefixes(row_columns, tokens) + text for row_columns, tokens, text in rows]
