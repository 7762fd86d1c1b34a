import json
import math

import pytest
from megaswift.templates.formats.schemas import UnusableRow, to_conversation, to_prompt, to_text

TURN = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CALL = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURN},
        {"messages": json.dumps(TURN)},
        {"messages": [{**message, "loss": None, "tool_calls": None} for message in TURN]},  # as Arrow fills structs
        {"messages": [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in TURN]},
        {"conversations": SHAREGPT},
        {"conversation": [{"human": "q", "assistant": "a"}]},
        {"query": "q", "response": "a"},
        {"query": "q", "response": "a", "history": None, "system": None, "id": 7},
        {"prompt": "q", "completion": "a"},
        {"question": "q", "answer": "a"},
        {"problem": "q", "solution": "a"},
        {"input": "q", "output": "a"},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"query": "q", "question": "no", "response": "a", "answer": "no"},
        {"problem": "q", "question": "", "instruction": None, "answer": "", "solution": "a"},
        {"instruction": "q", "input": "", "prompt": "q, formatted", "output": "a"},
    ],
)
def test_one_turn(row):
    assert to_conversation(row).messages == TURN


def test_several_turns_and_a_system_prompt():
    longer = [{"role": "system", "content": "s"}, *TURN, *TURN]
    assert to_conversation({"query": "q", "response": "a", "history": [["q", "a"]], "system": "s"}).messages == longer
    for asked in ({"instruction": "q", "input": ""}, {"instruction": "", "input": "q"}):
        row = {**asked, "output": "a", "history": [["q", "a"]], "system": "s"}
        assert to_conversation(row).messages == longer
        assert to_prompt(row).messages == longer[:-1]
    assert to_conversation({"messages": TURN + TURN, "system": "s"}).messages == longer
    assert to_conversation({"conversations": SHAREGPT + SHAREGPT, "system": "s"}).messages == longer
    assert to_conversation({"conversation": [{"human": "q", "assistant": "a"}] * 2, "system": "s"}).messages == longer
    assert to_conversation({"messages": longer, "system": "not this"}).messages == longer
    assert to_conversation({"instruction": "Add.", "input": "1 1", "output": "2"}).messages[0]["content"] == "Add.\n1 1"
    blank = {"instruction": "q", "input": float("nan"), "output": "a", "system": float("nan"), "history": float("nan")}
    assert to_conversation(blank).messages == TURN


def test_tools():
    tools = [{"type": "function", "function": {"name": "add"}}]
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}] * 2}
    answer = {"role": "tool", "content": "2"}
    expected = [TURN[0], called, answer, TURN[1]]
    rows = [
        {"messages": [TURN[0], *[{"role": "tool_call", "content": json.dumps(CALL)}] * 2, answer, TURN[1]]},
        {"messages": [TURN[0], called, answer, TURN[1]]},
        {
            "conversations": [
                SHAREGPT[0], *[{"from": "function_call", "value": json.dumps(CALL)}] * 2,
                {"from": "observation", "value": "2"}, SHAREGPT[1],
            ]
        },
    ]  # fmt: skip
    for row in rows:
        conversation = to_conversation({**row, "tools": json.dumps(tools)})
        assert (conversation.messages, conversation.tools) == (expected, tools)
    openai = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = to_conversation({"messages": [TURN[0], {"role": "assistant", "content": None, "tool_calls": [openai]}]})
    assert message.messages[1]["tool_calls"][0]["function"] == CALL


def test_loss_of_a_message():
    row = {"messages": [TURN[0], {**TURN[1], "loss": False}, TURN[0], {**TURN[1], "loss_scale": 0.3}]}
    assert to_conversation(row).weights == [None, 0.0, None, 0.3]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"a": 1, "b": 2}, "no known format: its columns are a, b; known formats: messages; .*--columns"),
        ({"messages": []}, "its column messages is an empty list"),
        ({"messages": "[{"}, "its messages is not JSON"),
        ({"messages": ["hello"]}, "its column messages is not a list of messages"),
        ({"messages": [{"role": "pirate", "content": "arr"}]}, "the role 'pirate'; known: system"),
        ({"messages": [{"role": "user"}]}, "a message has no content"),
        ({"messages": TURN[:1]}, "it has no answer of the assistant"),
        ({"query": "q", "response": ["a"]}, "its response is a list, where text is expected$"),
        ({"query": "q", "response": 4}, "its response is a number, where text is expected: write it as text"),
        ({"query": "q", "response": True}, "its response is true or false, where text is expected: write it as text"),
        ({"query": "q", "response": math.inf}, "its response is Infinity, where text is expected: write it as text"),
        ({"query": "q", "response": math.nan}, "its response is NaN"),
        ({"query": "q", "response": None}, "its response is null"),
        ({"query": math.nan, "response": "a"}, "its query is NaN"),
        ({"messages": math.nan}, "its messages is NaN"),
        ({"instruction": "q", "input": 5, "output": "a"}, "its input is a number, where text is expected"),
        ({"query": "q", "response": "a", "system": 5}, "its system is a number, where text is expected"),
        ({"messages": [TURN[0], {**TURN[1], "content": math.nan}]}, r"a message has no content \(it is NaN\)"),
        ({"messages": [TURN[0], {**TURN[1], "content": True}]}, "content of a message is true or false, where text"),
        ({"messages": [TURN[0], {**TURN[1], "content": -math.inf}]}, "content of a message is Infinity, where text"),
        (
            {"messages": [TURN[0], {**TURN[1], "content": ["x"]}]},
            'the content of a message is a list that holds text; expected is text, or a list of blocks as {"type": "te',
        ),
        ({"messages": [TURN[0], {**TURN[1], "content": [{"text": "x"}]}]}, "is a list of objects without a type"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "a message has a list as its role; known: system"),
        ({"messages": [{"content": "q"}]}, "a message has no role; known: system"),
        ({"query": "q", "response": "a", "tools": [5]}, "its tools hold a number, where objects"),
        ({"messages": [TURN[0], {**TURN[1], "tool_calls": [5]}]}, "a tool call is a number, where an object is"),
        ({"messages": [TURN[0], {**TURN[1], "thinking": 5}]}, "its thinking is a number, where text is expected"),
        ({"query": "q", "response": "a", "chat_template_kwargs": 5}, "its chat_template_kwargs is a number, where an"),
        (
            {"query": "q", "response": "a", "chat_template_kwargs": {"messages": []}},
            "its chat_template_kwargs sets messages, which the row's other columns decide",
        ),
        ({"messages": "[" * 100_000}, "its messages is JSON that is nested too deeply"),
        ({"query": "q", "response": "a", "history": [["q"]]}, "its history is not a list of .query, response."),
        ({"messages": TURN, "images": ["a.png"]}, "it has images, and this model has no vision tower"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a message has image content"),
        ({"messages": [TURN[0], {**TURN[1], "loss": "no"}]}, "a message's loss is 'no'"),
        (
            {"problem": "q", "solution": "long proof ... 42", "answer": "42"},
            "any of its columns answer, solution may be the response: select one by --columns, as in .*",
        ),
        (
            {"instruction": "Answer in French.", "question": "q", "response": "a"},
            """columns instruction, question may be the query: .* --columns '{"instruction": "query"}'""",
        ),
        ({"query": "q", "response": "a", "history": 5}, "its history is a number, where a list is expected"),
        ({"query": "q", "response": "a", "tools": {"name": "f"}}, "its tools is an object, where a list is expected"),
        ({"text": "once"}, "plain text without turns: use megatron pt"),
    ],
)
def test_rows_that_cannot_be_used(row, message):
    with pytest.raises(UnusableRow, match=message):
        to_conversation(row)


def test_an_answer_that_is_not_learned_may_be_of_any_form():
    for answer in (4, 4.5, True, ["4", "four"], {"value": 4}):
        assert to_prompt({"problem": "q", "answer": answer}).messages == TURN[:1]
    labelled = to_conversation({"query": "q", "response": 4}, answered=False, strict=False)
    assert labelled.messages[1]["content"] == "4"


def test_plain_text():
    for row in (
        {"text": "t"},
        {"content": "t", "id": 3},
        {"response": "t"},
        {"messages": [{"role": "assistant", "content": "t"}]},
    ):
        assert to_text(row) == "t"
    with pytest.raises(UnusableRow, match=r"messages of user, assistant: use megatron sft, with --loss_scale all"):
        to_text({"messages": TURN})
    with pytest.raises(UnusableRow, match="no known format: its columns are query, response; pt takes a column `text`"):
        to_text({"query": "q", "response": "a"})
    with pytest.raises(UnusableRow, match="any of its columns answer, output may be the response"):
        to_text({"answer": "42", "output": "It is 42."})


def test_a_prompt_has_columns_for_rewards():
    """That an answer is another column's matter too does not keep a row from being asked."""
    assert to_prompt({"problem": "q", "solution": "long proof ... 42", "answer": "42"}).messages == TURN[:1]


@pytest.mark.parametrize("more", [{}, {"answer": "a"}, {"response": 7}, {"data_source": "s", "tag": "t"}])
def test_a_prompt_may_be_a_list_of_messages(more):
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert to_prompt({"prompt": prompt} | more).messages == prompt
    assert to_prompt({"prompt": [*prompt, {"role": "assistant", "content": "a"}]} | more).messages == prompt
    assert to_prompt({"messages": TURN, "prompt": prompt}).messages == TURN[:1]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [([], "its column prompt is an empty list"), (["q"], "its column prompt is not a list of messages"),
     ([{"role": "system", "content": "s"}], "it has no prompt"), ([{"content": "q"}], "a message has no role")],
)  # fmt: skip
def test_lists_that_are_no_prompts(prompt, problem):
    with pytest.raises(UnusableRow, match=problem):
        to_prompt({"prompt": prompt})


def test_a_row_to_learn_from_needs_a_text_as_prompt():
    with pytest.raises(UnusableRow, match="its prompt is a list, where text is expected"):
        to_conversation({"prompt": TURN[:1], "response": "a"})
