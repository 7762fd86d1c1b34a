"""The scheduler `tools`: what the model is told of a call, and of one that goes wrong."""

import asyncio
import sys
import time

import pytest
from megaswift.tasks.multi_turn import Turn, tool
from megaswift.tasks.multi_turn.call import Scheduler, SchedulerCall, TurnError
from megaswift.tasks.multi_turn.registry import registered_tools
from megaswift.tasks.multi_turn.tools import Tools, schema_of
from megaswift.templates.media.images import open_image
from PIL import Image


@tool
def add(a: int, b: int = 1) -> int:
    """
    Adds numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@tool
def pair(a: str) -> dict:
    return {"ä": a}


@tool
async def later(a: str) -> str:
    await asyncio.sleep(0.2)
    return a.upper()


@tool
def hangs() -> str:
    time.sleep(60)
    return ""


@tool
async def waits() -> str:
    await asyncio.sleep(60)
    return ""


@tool
def ends() -> None:
    sys.exit(3)


@tool
def draw(side: int) -> object:
    picture = Image.new("RGB", (side, side))
    return picture if side > 1 else [{"type": "text", "text": "drawn: "}, {"type": "image", "image": "a.png"}]


REGISTERED = dict(registered_tools)
for name in REGISTERED:
    del registered_tools[name]


def asked(text: str, **columns) -> SchedulerCall:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return SchedulerCall("row 7", Turn(1, messages, text, text, [1], "stop", False, columns, {}, {}))


def tools(timeout: float = 10) -> Scheduler:
    return Scheduler("tools", Tools(REGISTERED, timeout), timeout, has_own_timeouts=True)


def told(*calls: str, timeout: float = 10, **columns) -> list[str]:
    text = "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    (messages,) = tools(timeout)([asked(text, **columns)])
    assert all(message["role"] == "tool" for message in messages)
    return [message["content"] for message in messages]


def call(name: str, arguments: str = "{}") -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def test_results():
    first, second, third = call("add", '{"a": 41}'), call("pair", '{"a": "x"}'), call("later", '{"a": "x"}')
    assert told(first, second, third) == ["42", '{"ä": "x"}', "X"]
    assert told(call("add", '"{\\"a\\": 1, \\"b\\": 4}"')) == ["5"]  # arguments as text, as some models write them
    (messages,) = tools()([asked(f"Hm. <tool_call>{first}")])  # cut at its end by a stop text
    assert messages == [{"role": "tool", "name": "add", "content": "42"}]


def test_images():
    picture, blocks = told(call("draw", '{"side": 2}'), call("draw", '{"side": 1}'))
    ((kind, data),) = [(block["type"], block["image"]) for block in picture]
    assert kind == "image"
    assert open_image(data).size == (2, 2)
    assert blocks == [{"type": "text", "text": "drawn: "}, {"type": "image", "image": "a.png"}]


def test_no_call_is_the_end():
    assert tools()([asked("It is 42.")]) == [[]]
    final = asked(f"<tool_call>{call('add', '{}')}</tool_call>")
    final.turn.final = True
    assert tools()([final]) == [[]]
    assert final.turn.info == {"tool_calls": 1, "tool_errors": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{oops", 'Error: a call is JSON of this form: {"name": "...", "arguments": {...}}'),
        ('{"arguments": {}}', "Error: a call is JSON of this form"),
        ('["add"]', "Error: a call is JSON of this form"),
        (call("add", "[1]"), "Error: a call is JSON of this form"),
        (call("sub"), "Error: there is no tool sub. There are: add, pair, later, hangs, waits, ends, draw"),
        (call("add"), "Error: TypeError: missing a required argument: 'a'"),
        (call("add", '{"c": 1, "a": 1}'), "Error: TypeError: got an unexpected keyword argument 'c'"),
        (call("add", '{"a": "x"}'), 'Error: TypeError: can only concatenate str (not "int") to str'),
        (call("ends"), "Error: RuntimeError: it ended the program (3)"),
    ],
)
def test_errors_are_told(text, message):
    (found,) = told(text)
    assert found.startswith(message)


def test_calls_and_errors_are_counted():
    each = asked(f"<tool_call>{call('add')}</tool_call><tool_call>{call('later', '{"a": ""}')}</tool_call>")
    tools()([each])
    assert each.turn.info == {"tool_calls": 2, "tool_errors": 1}


def test_one_that_hangs_is_left_behind():
    began = time.monotonic()
    late = "Error: no answer within 0.3 s"
    assert told(call("hangs"), call("waits"), call("add", '{"a": 1}'), timeout=0.3) == [late, late, "2"]
    assert time.monotonic() - began < 30


def test_async_ones_wait_together():
    began = time.monotonic()
    text = f"<tool_call>{call('later', '{"a": "x"}')}</tool_call>"
    assert len(tools()([asked(text) for _ in range(20)])) == 20
    assert time.monotonic() - began < 2  # one by one: 4


def test_rows_with_tools_of_their_own():
    own = '[{"type": "function", "function": {"name": "pair"}}]'
    assert told(call("add", '{"a": 1}'), tools=own) == ["Error: there is no tool add. There are: pair"]
    with pytest.raises(TurnError, match=r"names sub, which is no @tool. Use one of add, pair.* row 7, turn 1"):
        tools()([asked(f"<tool_call>{call('sub')}</tool_call>", tools=own.replace("pair", "sub"))])


def test_what_the_model_is_told_of_a_tool():
    arguments = {
        "a": {"type": "integer", "description": "The first."},
        "b": {"type": "integer", "description": "The second."},
    }
    parameters = {"type": "object", "properties": arguments, "required": ["a"]}
    wanted = {"name": "add", "description": "Adds numbers.", "parameters": parameters}
    found = schema_of(add)["function"]
    assert {name: found[name] for name in wanted} == wanted
    with pytest.raises(ValueError, match=r"@tool pair: .* Add type hints, and a docstring"):
        schema_of(pair)


def test_a_name_is_taken_once():
    tool(add)
    with pytest.raises(ValueError, match=r"@tool: there is already a tool add. Use another name"):
        tool(add)
