"""Tokens of prompts that the model does not have."""

from typing import Any

import pytest
from megaswift.tasks.options.groups import CompletionOptions
from megaswift.tasks.rl.sampler import Sampler
from megaswift.templates.batching.prompt_dataloader import Prompt


class Engines:
    """Generate nothing."""

    def generate(self, requests: list, sampling: Any) -> list:
        return []


def test_a_token_that_the_embedding_does_not_have() -> None:
    engines: Any = Engines()
    complete = Sampler(engines, CompletionOptions(), 0, eos_ids=None, vocab_size=8)
    assert complete([Prompt("row 1", [3, 7], {}), Prompt("row 2", [], {})]) == []
    with pytest.raises(ValueError, match=r"the tokenizer has token 8, and the model's embedding has 8 rows"):
        complete([Prompt("row 1", [8, 1], {})])
