"""Counts with nouns in messages."""

import pytest
from megaswift.templates.plural import plural


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "row", "1 row"),
        (0, "row", "0 rows"),
        (51760, "row", "51,760 rows"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (2, "batch", "2 batches"),
        (2, "query", "2 queries"),
        (2, "key", "2 keys"),
        (2, "training step", "2 training steps"),
    ],
)
def test_a_count_agrees_with_its_noun(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text
