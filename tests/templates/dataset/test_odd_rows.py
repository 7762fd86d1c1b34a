"""Values of every type in every field of a row, which is either read or dropped with a clear reason."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
from megaswift.templates.dataset.tokenize import Encoder
from megaswift.templates.formats.schemas import ArrowRow
from megaswift.templates.options import TemplateOptions

VALUES = [None, math.nan, math.inf, -math.inf, True, 0, 4, 1.5, "", " ", "x", "[", "[5]", "{}", b"x"]
VALUES += [[], {}, [None], [5], ["x"], [[]], [["x", "y"]], [{}], {"a": 1}, [{"type": "text"}], [{"text": "x"}]]
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TURNS = [
    {"role": "system", "content": "s", "value": None},
    {**USER, "content": [{"type": "text", "text": "q"}]},
    {**ANSWER, "tool_calls": [CALL], "reasoning_content": "t", "loss": True, "name": "n"},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "tool_call", "content": '{"name": "add", "arguments": {}}'},
    ANSWER,
]
MORE: dict[str, Any] = {"history": [["q", "a"]], "system": "s", "tools": [CALL], "chat_template_kwargs": {"x": 1}}
MORE |= {"label": 1, "margin": 1}
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"messages": TURNS}, {"query": "q", "response": "a", **MORE},
            {"conversation": [{"human": "q", "assistant": "a"}]}],
    "pt": [{"text": "t"}, {"messages": [ANSWER]}],
    "preference": [
        {"messages": TURNS, "rejected_response": "b", **MORE},
        {"query": "q", "response": "a", "rejected_messages": [USER, {**ANSWER, "content": "b"}]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]},
    ],
    "kto": [{"prompt": "q", "completion": "a", **MORE}, {"messages": [USER, ANSWER], "label": True}],
    "seq_cls": [{"text": "t", "label": [1, 0]}, {"messages": [USER], "label": 1}],
    "embedding": [{"anchor": "q", "positive": ["p"], "negative": ["n"]}, {"query": "q", "positive": "p", "label": 0.5}],
    "reranker": [{"messages": [USER], "positive_messages": [[USER]], "negative_messages": [[USER]], "label": None}],
    "prompts": [{"problem": "q", "solution": "a", **MORE}, {"messages": TURNS}],
    "answered": [{"messages": [USER, ANSWER]}, {"query": "q", "response": "a", **MORE}],
    "asked": [{"messages": [USER, ANSWER]}],
}  # fmt: skip


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path to every value in a row, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def with_value(row: dict[str, Any], path: tuple, value: Any) -> dict[str, Any]:
    row = copy.deepcopy(row)
    inside: Any = row
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return row


@pytest.mark.parametrize("stage", ROWS)
def test_every_type_in_every_field(make_tokenizer, stage):
    encoder = Encoder(make_tokenizer("qwen3"), TemplateOptions(), stage, {})

    rows = [with_value(row, path, value) for row in ROWS[stage] for path in places(row) for value in VALUES]
    rows += [ArrowRow(row) for row in rows[::3]]
    _, dropped = encoder.encode([(number, f"row {number}", row) for number, row in enumerate(rows)])
    for reason, examples in dropped.places.items():
        shown = f"{reason}: {rows[int(examples[0].removeprefix('row '))]}"
        assert "unexpected form" not in reason, shown
        assert not any(word in reason for word in ("object has no", "NoneType", "unhashable", "not supported")), shown
