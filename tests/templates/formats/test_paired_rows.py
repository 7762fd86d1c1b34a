"""Rows of several texts and rows with a label: all forms, and refused rows."""

import json

import pytest
from megaswift.templates.formats.paired_rows import (
    Passage,
    parse_binary,
    parse_number,
    parse_numbers,
    to_answer,
    to_contrastive,
    to_pair,
)
from megaswift.templates.formats.schemas import UnusableRow

USER, CHOSEN, REJECTED = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "good"), ("assistant", "bad"))
)
SYSTEM = {"role": "system", "content": "s"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "2"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, CHOSEN], "rejected_response": "bad"},
        {"messages": [USER, CHOSEN], "rejected_response": [REJECTED]},
        {"messages": [USER, CHOSEN], "rejected_messages": [USER, REJECTED]},
        {"messages": [USER, CHOSEN], "rejected_messages": json.dumps([USER, REJECTED]), "rejected_response": None},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}],
         "rejected_response": "bad"},
        {"query": "q", "response": "good", "rejected_response": "bad"},
        {"query": "q", "response": "good", "rejected_messages": [USER, REJECTED]},
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "question": "no", "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": [CHOSEN], "rejected": [REJECTED]},
        {"prompt": "q", "chosen": [CHOSEN], "rejected": [REJECTED], "completion": "neither"},
        {"chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
        {"prompt": "q", "chosen": [USER, CHOSEN], "rejected": [USER, REJECTED], "messages": [USER, CHOSEN]},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
         "rejected": {"from": "gpt", "value": "bad"}},
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    ],
)  # fmt: skip
def test_pairs(row):
    assert [conversation.messages for conversation in to_pair(row)] == [[USER, CHOSEN], [USER, REJECTED]]
    with_system = [conversation.messages for conversation in to_pair({**row, "system": "s"})]
    assert with_system == [[SYSTEM, USER, CHOSEN], [SYSTEM, USER, REJECTED]]


def test_pairs_of_several_turns():
    before = [USER, CHOSEN, USER]
    history = {"query": "q", "history": [["q", "good"]], "response": "good", "rejected_response": "bad"}
    assert to_pair(history)[1].messages == [*before, REJECTED]
    tools = [USER, CALL, RESULT, CHOSEN]
    chosen, rejected = to_pair({"messages": tools, "rejected_response": "bad", "tools": [{"name": "add"}]})
    assert [message["role"] for message in chosen.messages] == ["user", "assistant", "tool", "assistant"]
    assert rejected.messages == [*chosen.messages[:3], REJECTED], "a text stands for the last message"
    assert rejected.tools == chosen.tools == [{"name": "add"}]
    [_, rejected] = to_pair({"messages": tools, "rejected_response": [CALL, RESULT, REJECTED]})
    assert rejected.messages == [*chosen.messages[:3], REJECTED], "messages stand for all after the user's last"
    loss = {"messages": [USER, {**CHOSEN, "loss": 0.5}], "rejected_response": "bad"}
    assert [conversation.weights for conversation in to_pair(loss)] == [[None, 0.5]] * 2


def test_answers_to_judge():
    for row in (
        {"messages": [USER, CHOSEN]},
        {"prompt": "q", "completion": "good"},
        {"prompt": [USER], "completion": [CHOSEN]},
    ):
        assert to_answer(row).messages == [USER, CHOSEN]
    assert [parse_binary(label) for label in (True, 1, 1.0, "1", "true", "True")] == [1.0] * 6
    assert [parse_binary(label) for label in (False, 0, 0.0, "0", "false", "FALSE")] == [0.0] * 6
    assert [parse_numbers(label, "label") for label in (3, "3", [1, 4], "[1, 4]", 0.5, [], True)] == [
        [3.0], [3.0], [1.0, 4.0], [1.0, 4.0], [0.5], [], [1.0],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER], "positive_messages": [[{"role": "user", "content": "p"}]],
         "negative_messages": [[{"role": "assistant", "content": "n"}], [{"role": "user", "content": "m"}]]},
        {"messages": [USER], "positive_messages": json.dumps([[CHOSEN | {"content": "p"}]]), "negative": ["n", "m"]},
        {"messages": [USER], "positive_messages": [CHOSEN | {"content": "p"}], "negative": ["n", "m"]},
        {"anchor": "q", "positive": "p", "negative": ["n", "m"]},
        {"query": "q", "positive": ["p"], "negative": ["n", "m"], "negative_messages": None},
    ],
)  # fmt: skip
def test_comparisons(row):
    positives, negatives = [Passage("", "p")], [Passage("", "n"), Passage("", "m")]
    assert to_contrastive(row) == (Passage("", "q"), positives, negatives)
    assert to_contrastive({**row, "system": "s"}) == (Passage("s", "q"), positives, negatives)


def test_system_prompts_of_texts():
    row = {"messages": [SYSTEM, USER], "positive_messages": [[SYSTEM, CHOSEN]], "system": "another"}
    assert to_contrastive(row) == (Passage("s", "q"), [Passage("s", "good")], [])
    assert to_contrastive({"query": "q", "positive": "p"}).negatives == []


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (to_pair, {"messages": [USER, CHOSEN]}, "it has no rejected answer: add rejected_response or"),
        (to_pair, {"query": "q", "response": "a", "rejected_response": ""}, "its rejected answer is empty"),
        (to_pair, {"query": "q", "response": " \n", "rejected_response": "b"}, "its chosen answer is empty"),
        (to_pair, {"prompt": "q", "chosen": "", "rejected": "b"}, "its chosen answer is empty"),
        (to_pair, {"prompt": "q", "chosen": [CHOSEN], "rejected": []}, "its column rejected is an empty list"),
        (to_pair, {"chosen": "a", "rejected": "b"}, "it has no prompt before its chosen"),
        (to_pair, {"prompt": "q", "chosen": 3.5, "rejected": {}}, "its chosen is a number, where text is expected"),
        (to_pair, {"prompt": "q", "chosen": ["a"], "rejected": "b"}, "its column chosen is not a list of messages"),
        (to_pair, {"messages": [USER, CHOSEN, USER], "rejected_response": "b"},
         "its chosen answer is missing: the last message is of the role user"),
        (to_pair, {"messages": [USER, CHOSEN], "rejected_messages": [USER]}, "its rejected answer is missing"),
        (to_pair, {"messages": [USER, CHOSEN], "rejected_response": {"a": 1}}, "its rejected_response is an object"),
        (to_pair, {"prompt": "q", "chosen": "a", "rejected": "b", "images": ["x"]}, "it has images"),
        (to_answer, {"messages": [USER, CHOSEN, USER]}, "its answer is missing"),
        (to_answer, {"prompt": "q", "completion": " "}, "its answer is empty"),
        (to_answer, {"prompt": [USER], "completion": [CHOSEN], "videos": ["x"]}, "it has videos"),
        (to_contrastive, {"messages": [USER]}, "it has no positive text: add positive_messages or positive"),
        (to_contrastive, {"text": "q"}, "it has no text to compare: its columns are text; add messages, anchor or"),
        (to_contrastive, {"messages": [USER, CHOSEN], "positive": "p"}, "its messages holds 2 messages, where one is"),
        (to_contrastive, {"query": "q", "positive_messages": [[USER, USER]]}, "its positive_messages holds 2 messages"),
        (to_contrastive, {"query": "q", "positive_messages": "[{"}, "its positive_messages is not JSON"),
        (to_contrastive, {"query": "q", "positive_messages": ["p"]}, "its column positive_messages is not a list"),
        (to_contrastive, {"query": " ", "positive": "p"}, "its query is empty"),
        (to_contrastive, {"query": "q", "positive": "p", "negative": ["n", ""]}, "its negative is empty"),
        (to_contrastive, {"query": "q", "positive": [["p"]]}, "its positive is a list, where text is expected"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(read, row, message):
    with pytest.raises(UnusableRow, match=message):
        read(row)


@pytest.mark.parametrize(
    ("read", "label", "message"),
    [
        (parse_binary, None, "it has no label: true, false, 1 or 0 is expected"),
        (parse_binary, 2, "its label is 2, where true, false, 1 or 0 is expected"),
        (parse_binary, "good", "its label is 'good', where true"),
        (parse_binary, [1], r"its label is \[1\], where true"),
        (parse_numbers, None, "it has no label: a number or a list of numbers is expected"),
        (
            parse_numbers,
            "good" * 30,
            r"its label is 'good.{0,40}\.\.\., where a number or a list of numbers is expected",
        ),
        (parse_numbers, [1, None], r"its label is \[1, None\], where a number"),
        (parse_numbers, float("nan"), "its label is nan, where a number"),
        (parse_number, [1, 2], r"its label is \[1, 2\], where one number is expected"),
    ],
)
def test_labels_that_cannot_be_used(read, label, message):
    with pytest.raises(UnusableRow, match=message):
        read(label) if read is parse_binary else read(label, "label")
