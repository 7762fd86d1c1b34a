"""A row of a dataset, in any of the usual formats -> one conversation, or one text.

The format is found by the columns:
- `messages` (role, content) or `conversations` (sharegpt: from, value; or pairs of human, assistant)
- `instruction`, `input`, `output`
- `query`, `response` and their aliases, with `history` and `system`
- `text`: plain text, for pre-training

Rows of several documents, and rows with a label, are in paired_rows.py.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

Stage = Literal[
    "sft", "pt", "preference", "kto", "seq_cls", "embedding", "reranker", "prompts", "answered", "asked"
]  # fmt: skip
ALONE = ("sft", "pt")  # a sample is one document without a label
POOLED = ("seq_cls", "embedding", "reranker")  # no token is predicted: a document is one vector or a few scores
# A sample is a prompt; of "answered" also the conversation with its answer, of "asked" where the row has one.
PROMPTED = ("prompts", "answered", "asked")

QUERY = ("query", "prompt", "input", "instruction", "question", "problem")
RESPONSE = ("response", "answer", "output", "targets", "target", "answer_key", "answers", "solution", "completion")
TEXT = ("text", "content")
MESSAGES = ("messages", "conversations", "conversation")
STRUCTURED = (
    *MESSAGES, "prompt", "completion", "chosen", "rejected", "rejected_messages", "rejected_response",
    "positive_messages", "negative_messages", "tools", "chat_template_kwargs",
)  # fmt: skip
BLOCKS = 'or a list of blocks as {"type": "text", "text": "..."}'
# What the chat template is rendered with beside the arguments of the row.
RENDERED = {
    "self", "compiled_template", "conversations", "messages", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
}  # fmt: skip
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool_call": "tool_call", "function_call": "tool_call",
    "tool": "tool", "tool_response": "tool", "function_response": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
KNOWN = (
    "messages; conversations; query + response (+ history, system; or "
    f"{', '.join(QUERY[1:])} + {', '.join(RESPONSE[1:])}); instruction + input + output; for pt also: text"
)


class ArrowRow(dict[str, Any]):
    """A row of an Arrow table: in its structs, nulls fill the keys that only other rows have."""


class UnusableRow(ValueError):
    """Why a row cannot be used. Rows of the same reason are counted together: it names no row and quotes little.

    `tokens`: the length of a row that is too long.
    """

    def __init__(self, reason: str, tokens: int | None = None):
        super().__init__(reason)
        self.tokens = tokens


@contextmanager
def usable() -> Iterator[None]:
    """Around what reads a row: UnusableRow for a column of a form that is not looked for, and for what is no text."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise UnusableRow("it holds half a character (a surrogate without its other one), which is no text") from error
    except RecursionError as error:
        raise UnusableRow("it is nested too deeply") from error
    except (TypeError, AttributeError, KeyError) as error:
        raise UnusableRow("one of its columns has an unexpected form") from error


def kind_of(value: Any) -> str:
    """Return what a value is, in JSON's words: "a number", "an object"."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list() | tuple():
            return "a list"
        case dict():
            return "an object"
    return f"a {type(value).__name__}"


def is_missing(value: Any) -> bool:
    """Whether a value is null, or NaN: pandas' word for null, which its rows keep when they become JSON."""
    return value is None or (isinstance(value, float) and math.isnan(value))


@dataclass
class Conversation:
    """What the chat template is given, and how much each message is trained on (None: as --loss_scale says)."""

    messages: list[dict[str, Any]]
    weights: list[float | None]
    tools: list[dict] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def begin_with(self, system: str) -> None:
        """Put in this system prompt where there is none."""
        if self.messages[0]["role"] != "system":
            self.messages.insert(0, {"role": "system", "content": system})
            self.weights.insert(0, None)


def to_text(row: dict[str, Any]) -> str:
    """The text of a row for pre-training: plain text, or messages with a single one of the assistant."""
    row = present(row)
    if text := next((column for column in TEXT if column in row), None):
        return string(row[text], text)
    if not any(column in row for column in QUERY) and (response := _one_of(row, RESPONSE)) is not None:
        return response
    if messages := message_list(row):
        roles = [role_of(message) for message in messages]
        if roles != ["assistant"]:
            raise UnusableRow(
                f"pre-training takes plain text, and this row has messages of {', '.join(dict.fromkeys(roles))}: "
                "use megatron sft, with --loss_scale all to train on every token"
            )
        return content_of(messages[0])
    raise UnusableRow(_unknown_format(row, "pt takes a column `text`, or messages with a single one of the assistant"))


def to_conversation(row: dict[str, Any], *, answered: bool = True, sure: bool = True) -> Conversation:
    """The conversation of a row for fine-tuning; with `answered` false, a row to answer may end with the user.

    `sure`: refuse a row of which several columns might be the query or the response. Else the first of QUERY and of
    RESPONSE is taken.
    """
    original, row = row, text_only(row)
    if not sure:  # the answer is for rewards, or to compare with: it may be a number
        numbers = {name: str(row[name]) for name in RESPONSE if isinstance(row.get(name), int | float)}
        row = row | numbers
    if messages := message_list(row):
        conversation = from_messages(messages)
    elif (query := _query(row, sure)) is not None and (
        (response := _one_of(row, RESPONSE, sure)) is not None or not answered
    ):
        conversation = _from_turns(_list(row, "history"), query, response or "")
        if response is None:
            del conversation.messages[-1], conversation.weights[-1]
    elif any(column in row for column in TEXT):
        raise UnusableRow("it is plain text, which has no turns: use megatron pt")
    elif (missing := _missing(original, (*MESSAGES, *RESPONSE, *QUERY))) is not None:
        raise UnusableRow(f"its {missing} is {kind_of(original[missing])}")
    else:
        raise UnusableRow(_unknown_format(row, f"known formats: {KNOWN}"))
    if answered and not any(message["role"] == "assistant" for message in conversation.messages):
        raise UnusableRow("the assistant says nothing in it")
    return with_columns(conversation, row)


def to_prompt(row: dict[str, Any]) -> Conversation:
    """The conversation of a row up to what is to be answered: an answer that it ends with is dropped.

    An answer in a column of its own may be of any form: it is for rewards alone.
    """
    unread = {column: "" for column in RESPONSE if not is_missing(row.get(column))}
    conversation = to_conversation(type(row)(row | unread), answered=False, sure=False)
    while conversation.messages and conversation.messages[-1]["role"] == "assistant":
        del conversation.messages[-1], conversation.weights[-1]
    if not conversation.messages or conversation.messages[-1]["role"] == "system":
        raise UnusableRow("it asks nothing: a message of the user (or of a tool) is needed")
    return conversation


def renamed(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """A row whose columns have other names, as --columns gives them."""
    return type(row)((columns.get(column, column), value) for column, value in row.items()) if columns else row


def with_columns(conversation: Conversation, row: dict[str, Any]) -> Conversation:
    """With what other columns of its row say: a system prompt where it has none, tools, arguments of the template."""
    if not is_missing(system := row.get("system")) and (system := string(system, "system")):
        conversation.begin_with(system)
    if tools := [from_json(tool, "tools") for tool in _list(row, "tools")]:
        if other := next((tool for tool in tools if not isinstance(tool, dict)), None):
            raise UnusableRow(f"its tools hold {kind_of(other)}, where objects (JSON schemas) are expected")
        conversation.tools = tools
    conversation.template_kwargs = _template_kwargs(row)
    return conversation


def _template_kwargs(row: dict[str, Any]) -> dict[str, Any]:
    column = "chat_template_kwargs"
    kwargs = None if is_missing(row.get(column)) else from_json(row[column], column)
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise UnusableRow(f"its {column} is {kind_of(kwargs)}, where an object is expected")
    if taken := kwargs.keys() & RENDERED:
        raise UnusableRow(f"its {column} sets {min(taken)}, which the row's other columns decide: remove it there")
    return kwargs


def present(row: dict[str, Any]) -> dict[str, Any]:
    """The columns that hold something: Arrow and CSV fill what a row does not have with nulls, pandas with NaN.

    Of an ArrowRow, likewise in what the chat template is given. In JSON a null below the columns is meant.
    """
    held = {column: value for column, value in row.items() if not is_missing(value)}
    if isinstance(row, ArrowRow):
        held |= {column: _without_nulls(held[column]) for column in STRUCTURED if column in held}
    return held


def _without_nulls(value: Any) -> Any:
    """Without the keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def text_only(row: dict[str, Any]) -> dict[str, Any]:
    """Likewise. Raises UnusableRow where there are images and the like."""
    for column in MEDIA:
        if row.get(column):
            raise UnusableRow(f"it has {column}, and this version trains on text only")
    return present(row)


def _query(row: dict[str, Any], sure: bool) -> str | None:
    if "instruction" in row and "input" in row:
        return "\n".join(part for name in ("instruction", "input") if (part := string(row[name], name)))
    return _one_of(row, QUERY, sure)


def _one_of(row: dict[str, Any], columns: tuple[str, ...], sure: bool = True) -> str | None:
    """The text in the one of these columns that the row has. The first of them wins by its name."""
    found = [column for column in columns if column in row]
    if sure and columns[0] not in found:
        found = [column for column in found if row[column] != ""] or found[:1]
        if len(found) > 1:
            raise UnusableRow(
                f"any of its columns {', '.join(found)} may be the {columns[0]}: name the one that is by --columns, as "
                f"""in --columns '{{"{found[0]}": "{columns[0]}"}}'"""
            )
    return string(row[found[0]], found[0]) if found else None


def _missing(row: dict[str, Any], columns: tuple[str, ...]) -> str | None:
    """The first of these columns that the row has, and that holds nothing."""
    return next((column for column in columns if column in row and is_missing(row[column])), None)


def _list(row: dict[str, Any], column: str) -> list:
    value = None if is_missing(row.get(column)) else from_json(row[column], column)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UnusableRow(f"its {column} is {kind_of(value)}, where a list is expected")
    return value


def string(value: Any, column: str) -> str:
    if not isinstance(value, str):
        quotes = ": write it as text" if isinstance(value, bool | int | float) else ""
        raise UnusableRow(f"its {column} is {kind_of(value)}, where text is expected{quotes}")
    return value


def from_json(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    if not value:
        return None
    try:
        return json.loads(value)
    except ValueError as error:
        raise UnusableRow(f"its {column} is not JSON") from error
    except RecursionError as error:
        raise UnusableRow(f"its {column} is JSON that is nested too deeply") from error


def message_list(row: dict[str, Any], columns: tuple[str, ...] = MESSAGES) -> list[dict] | None:
    """The messages in the first of these columns that the row has."""
    for column in columns:
        if column in row:
            messages = from_json(row[column], column)
            if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
                raise UnusableRow(f"its column {column} is not a list of messages")
            if not messages:
                raise UnusableRow(f"its column {column} is an empty list")
            return _pairs(messages)
    return None


def says_nothing(message: dict[str, Any]) -> bool:
    """Whether a message of the assistant has neither text nor calls nor a thought."""
    return not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _pairs(messages: list[dict]) -> list[dict]:
    """[{"human": ..., "assistant": ...}, ...] as messages; others as they are."""
    if not all({"human", "assistant"} <= message.keys() for message in messages):
        return messages
    return [{"role": role, "content": pair[role]} for pair in messages for role in ("human", "assistant")]


def role_of(message: dict) -> str:
    role = message.get("role") or message.get("from")
    if not isinstance(role, str):
        what = "no role" if is_missing(role) else f"{kind_of(role)} as its role"
        raise UnusableRow(f"a message has {what}; known: {', '.join(ROLES)}")
    if role not in ROLES:
        raise UnusableRow(f"a message has the role {role[:40]!r}; known: {', '.join(ROLES)}")
    return ROLES[role]


def content_of(message: dict) -> str:
    contents = [message[key] for key in ("content", "value") if message.get(key) is not None]
    content = next((content for content in contents if not is_missing(content)), next(iter(contents), None))
    if isinstance(content, list):  # OpenAI's content blocks
        return "".join(map(_text_of_block, content))
    if is_missing(content):
        if not message.get("tool_calls"):
            raise UnusableRow(f"a message has no content{' (it is NaN)' if content is not None else ''}")
        return ""
    if not isinstance(content, str):
        raise UnusableRow(f"the content of a message is {kind_of(content)}, where text is expected, {BLOCKS}")
    return content


def _text_of_block(block: Any) -> str:
    if not isinstance(block, dict):
        raise UnusableRow(f"the content of a message is a list that holds {kind_of(block)}; expected is text, {BLOCKS}")
    kind = block.get("type")
    if not isinstance(kind, str):
        raise UnusableRow(f"the content of a message is a list of objects without a type; expected is text, {BLOCKS}")
    if kind != "text":
        raise UnusableRow(f"a message has {kind[:40]} content, and this version trains on text only")
    return string(block.get("text"), "text")


def _from_turns(history: list, query: str, response: str) -> Conversation:
    messages = []
    for turn in [*history, (query, response)]:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise UnusableRow("its history is not a list of [query, response]")
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]
    return from_messages(messages)


def from_messages(rows: list[dict]) -> Conversation:
    messages: list[dict[str, Any]] = []
    weights: list[float | None] = []
    for row in rows:
        role, weight = role_of(row), _weight(row)
        if role == "tool_call":
            call = {"type": "function", "function": _call(from_json(content_of(row), "tool_call"))}
            if messages and messages[-1]["role"] == "assistant":  # one turn, of text and of one call or more
                messages[-1].setdefault("tool_calls", []).append(call)
                weights[-1] = weight if weights[-1] is None else weights[-1]
                continue
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            message: dict[str, Any] = {"role": role, "content": content_of(row)}
            if calls := _list(row, "tool_calls"):
                message["tool_calls"] = [_tool_call(call) for call in calls]
            for key in ("reasoning_content", "thinking", "name", "tool_call_id"):
                if not is_missing(row.get(key)):
                    message[key] = string(row[key], key)
            # Templates read one or the other.
            if thought := message.get("reasoning_content") or message.get("thinking"):
                for key in ("reasoning_content", "thinking"):
                    message[key] = message.get(key) or thought
        messages.append(message)
        weights.append(weight)
    return Conversation(messages, weights)


def _tool_call(call: Any) -> dict[str, Any]:
    """One of a message's `tool_calls`, as OpenAI writes it."""
    if not isinstance(call, dict):
        raise UnusableRow(f"a tool call is {kind_of(call)}, where an object is expected")
    return {**call, "function": _call(call.get("function", call))}


def _call(call: Any) -> dict[str, Any]:
    """A function call with its arguments as a dict: the one form that every chat template takes."""
    if not isinstance(call, dict) or "name" not in call:
        raise UnusableRow("a tool call has no name")
    if not isinstance(call["name"], str):
        raise UnusableRow(f"the name of a tool call is {kind_of(call['name'])}, where text is expected")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # some models write free text there
            arguments = json.loads(arguments)
    return {"name": call["name"], "arguments": arguments}


def _weight(message: dict) -> float | None:
    loss = message.get("loss_scale") if is_missing(message.get("loss")) else message["loss"]
    if is_missing(loss):
        return None
    if not isinstance(loss, int | float) or not 0 <= loss < math.inf:
        raise UnusableRow(f"a message's loss is {repr(loss)[:40]}; true, false or a weight is expected")
    return float(loss)


def _unknown_format(row: dict[str, Any], known: str) -> str:
    return f"no known format: its columns are {', '.join(row) or 'none'}; {known}; --columns renames columns"
