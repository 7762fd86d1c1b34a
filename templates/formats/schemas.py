"""Conversion of dataset rows in all common formats to conversations and texts.

The format is detected by the columns:
- `messages` (role, content) or `conversations` (sharegpt: from, value; or pairs of human, assistant)
- `instruction`, `input`, `output`
- `query`, `response` and their aliases, with `history` and `system`
- `prompt` as a list of messages, as in verl's data, where no answer is needed
- `text`: plain text, for pre-training

paired_rows.py converts rows of several documents and rows with a label.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from ..json_types import Json, JsonObject
from .medium import Medium, count_sentinels

Stage = Literal[
    "sft", "pt", "preference", "kto", "seq_cls", "embedding", "reranker", "prompts", "answered", "asked"
]  # fmt: skip
UNGROUPED = ("sft", "pt")  # stages whose sample is one document without a label
POOLED = ("seq_cls", "embedding", "reranker")  # stages that predict no tokens: a document yields a vector or scores
# A sample is a prompt, followed by the conversation with its answer: always in "answered", if there is one in "asked".
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
# Arguments of the chat template that no row may set.
RESERVED = {
    "self", "compiled_template", "conversations", "messages", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
}  # fmt: skip
MEDIA = (
    "images", "image", "videos", "video", "audios", "audio",
    *(f"{part}_{kind}" for part in ("rejected", "positive", "negative") for kind in ("images", "videos", "audios")),
)  # fmt: skip
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool_call": "tool_call", "function_call": "tool_call",
    "tool": "tool", "tool_response": "tool", "function_response": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
FORMATS = (
    "messages; conversations; query + response (+ history, system; or "
    f"{', '.join(QUERY[1:])} + {', '.join(RESPONSE[1:])}); instruction + input + output; for pt also: text"
)


class ArrowRow(dict):
    """Row of an Arrow table. Its structs have nulls for keys that occur only in other rows."""


class UnusableRow(ValueError):
    """Reason to drop a row. Rows with the same reason are counted together, so its text names no row.

    tokens: length of a row that is too long
    """

    def __init__(self, reason: str, tokens: int | None = None):
        super().__init__(reason)
        self.tokens = tokens


@contextmanager
def row_errors() -> Iterator[None]:
    """Convert errors of code that reads a malformed row to UnusableRow."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise UnusableRow("it contains a lone surrogate, which is no text") from error
    except RecursionError as error:
        raise UnusableRow("it is nested too deeply") from error
    except (TypeError, AttributeError, KeyError) as error:
        raise UnusableRow("one of its columns has an unexpected form") from error


def json_type(value: object) -> str:
    """Return the JSON type of a value for a message: "a number", "an object"."""
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


def is_missing(value: object) -> bool:
    """Return whether a value is null, or NaN, as pandas writes it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


@dataclass
class Conversation:
    """Arguments of the chat template, and a loss weight per message (None: by --loss_scale)."""

    messages: list[JsonObject]
    weights: list[float | None]
    tools: list[JsonObject] | None = None
    template_kwargs: JsonObject = field(default_factory=dict)
    media: list[Medium] = field(default_factory=list)  # in the order of their sentinels in the messages' contents

    def add_system(self, system: str) -> None:
        """Insert a system prompt if there is none."""
        if self.messages[0]["role"] != "system":
            self.messages.insert(0, {"role": "system", "content": system})
            self.weights.insert(0, None)


def to_text(row: JsonObject) -> str:
    """Return the text of a row for pre-training: a text column, or a single assistant message."""
    row = require_text_only(row)
    if text := next((column for column in TEXT if column in row), None):
        return require_string(row[text], text)
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
    raise UnusableRow(_unknown_format(row, "pt takes a column `text`, or a single message of the assistant"))


def to_conversation(row: JsonObject, *, answered: bool = True, strict: bool = True) -> Conversation:
    """Return the conversation of a row.

    answered: require an answer; else the conversation may end with the user's message
    strict: refuse a row in which several columns may be the query or the response; else use the first of QUERY and of
        RESPONSE, which may be a number
    """
    original, row = row, require_text_only(row)
    if not strict:
        numbers = {name: str(row[name]) for name in RESPONSE if isinstance(row.get(name), int | float)}
        row = row | numbers
    messages = message_list(row)
    if messages is None and not answered and isinstance(row.get("prompt"), list):
        messages = message_list(row, ("prompt",))
    if messages:
        conversation = from_messages(messages)
    elif (query := _query(row, strict)) is not None and (
        (response := _one_of(row, RESPONSE, strict)) is not None or not answered
    ):
        conversation = _from_turns(_parse_list(row, "history"), query, response or "")
        if response is None:
            del conversation.messages[-1], conversation.weights[-1]
    elif any(column in row for column in TEXT):
        raise UnusableRow("it is plain text without turns: use megatron pt")
    elif (missing := _missing(original, (*MESSAGES, *RESPONSE, *QUERY))) is not None:
        raise UnusableRow(f"its {missing} is {json_type(original[missing])}")
    else:
        raise UnusableRow(_unknown_format(row, f"known formats: {FORMATS}"))
    if answered and not any(message["role"] == "assistant" for message in conversation.messages):
        raise UnusableRow("it has no answer of the assistant")
    return with_columns(conversation, row)


def to_prompt(row: JsonObject) -> Conversation:
    """Return the conversation of a row without its final answer.

    An answer in a separate column may have any form, because only reward functions read it.
    """
    return without_answer(to_open_conversation(row))


def to_open_conversation(row: JsonObject) -> Conversation:
    """Return the conversation of a row, without an answer in a separate column."""
    unread = {column: "" for column in RESPONSE if not is_missing(row.get(column))}
    return to_conversation(type(row)(row | unread), answered=False, strict=False)


def without_answer(conversation: Conversation) -> Conversation:
    """Return a conversation without the assistant's messages at its end, and the media there."""
    messages = conversation.messages
    count = next((count for count in range(len(messages), 0, -1) if messages[count - 1]["role"] != "assistant"), 0)
    if not count or messages[count - 1]["role"] == "system":
        raise UnusableRow("it has no prompt: a message of the user (or of a tool) is needed")
    removed = sum(count_sentinels(message["content"]) for message in messages[count:])
    return replace(
        conversation,
        messages=messages[:count],
        weights=conversation.weights[:count],
        media=conversation.media[: len(conversation.media) - removed],
    )


def with_columns(conversation: Conversation, row: JsonObject) -> Conversation:
    """Set system prompt (if missing), tools and template arguments of a conversation from its row."""
    if not is_missing(system := row.get("system")) and (system := require_string(system, "system")):
        conversation.add_system(system)
    tools: list[JsonObject] = []
    for tool in (parse_json(item, "tools") for item in _parse_list(row, "tools")):
        if not isinstance(tool, dict):
            raise UnusableRow(f"its tools hold {json_type(tool)}, where objects (JSON schemas) are expected")
        tools.append(tool)
    conversation.tools = tools or conversation.tools
    conversation.template_kwargs = template_kwargs(row)
    return conversation


def template_kwargs(row: JsonObject) -> JsonObject:
    """Return the arguments of the chat template that a row sets."""
    column = "chat_template_kwargs"
    kwargs = None if is_missing(row.get(column)) else parse_json(row[column], column)
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise UnusableRow(f"its {column} is {json_type(kwargs)}, where an object is expected")
    if taken := kwargs.keys() & RESERVED:
        raise UnusableRow(f"its {column} sets {min(taken)}, which the row's other columns decide: remove it there")
    return kwargs


def drop_missing(row: JsonObject) -> JsonObject:
    """Return the columns that have a value: Arrow and CSV write null for a missing value, pandas NaN.

    Nulls within Arrow columns stand for missing keys: they are removed for the chat template. In JSON they are values.
    """
    columns = {column: value for column, value in row.items() if not is_missing(value)}
    if isinstance(row, ArrowRow):
        columns |= {column: _without_nulls(columns[column]) for column in STRUCTURED if column in columns}
    return columns


def _without_nulls(value: Json) -> Json:
    """Return a nested value without the keys whose value is null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def require_text_only(row: JsonObject) -> JsonObject:
    """Return the columns that have a value. Raises UnusableRow for a row with images, videos or audio."""
    for column in MEDIA:
        if row.get(column):
            tower = "audio" if "audio" in column else "vision"
            raise UnusableRow(f"it has {column}, and this model has no {tower} tower")
    return drop_missing(row)


def _query(row: JsonObject, strict: bool) -> str | None:
    if "instruction" in row and "input" in row:
        return "\n".join(part for name in ("instruction", "input") if (part := require_string(row[name], name)))
    return _one_of(row, QUERY, strict)


def _one_of(row: JsonObject, columns: tuple[str, ...], strict: bool = True) -> str | None:
    """Return the text of the first of these columns, or else of the only other one that the row has."""
    matches = [column for column in columns if column in row]
    if strict and columns[0] not in matches:
        matches = [column for column in matches if row[column] != ""] or matches[:1]
        if len(matches) > 1:
            raise UnusableRow(
                f"any of its columns {', '.join(matches)} may be the {columns[0]}: select one by --columns, as in "
                f"""--columns '{{"{matches[0]}": "{columns[0]}"}}'"""
            )
    return require_string(row[matches[0]], matches[0]) if matches else None


def _missing(row: JsonObject, columns: tuple[str, ...]) -> str | None:
    """Return the first of these columns that is in the row without a value."""
    return next((column for column in columns if column in row and is_missing(row[column])), None)


def _parse_list(row: JsonObject, column: str) -> list[Json]:
    value = None if is_missing(row.get(column)) else parse_json(row[column], column)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UnusableRow(f"its {column} is {json_type(value)}, where a list is expected")
    return value


def require_string(value: object, column: str) -> str:
    if not isinstance(value, str):
        quotes = ": write it as text" if isinstance(value, bool | int | float) else ""
        raise UnusableRow(f"its {column} is {json_type(value)}, where text is expected{quotes}")
    return value


def parse_json(value: Json, column: str) -> Json:
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


def message_list(row: JsonObject, columns: tuple[str, ...] = MESSAGES) -> list[JsonObject] | None:
    """Return the messages in the first of these columns that the row has."""
    for column in columns:
        if column in row:
            messages = parse_json(row[column], column)
            objects = [item for item in messages if isinstance(item, dict)] if isinstance(messages, list) else []
            if not isinstance(messages, list) or len(objects) < len(messages):
                raise UnusableRow(f"its column {column} is not a list of messages")
            if not messages:
                raise UnusableRow(f"its column {column} is an empty list")
            return _split_pairs(objects)
    return None


def is_empty_answer(message: JsonObject) -> bool:
    """Return whether an assistant message has no text, tool calls or thought."""
    return not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _split_pairs(messages: list[JsonObject]) -> list[JsonObject]:
    """Convert [{"human": ..., "assistant": ...}, ...] to messages; return other messages unchanged."""
    if not all({"human", "assistant"} <= message.keys() for message in messages):
        return messages
    return [{"role": role, "content": pair[role]} for pair in messages for role in ("human", "assistant")]


def role_of(message: JsonObject) -> str:
    role = message.get("role") or message.get("from")
    if not isinstance(role, str):
        problem = "no role" if is_missing(role) else f"{json_type(role)} as its role"
        raise UnusableRow(f"a message has {problem}; known: {', '.join(ROLES)}")
    if role not in ROLES:
        raise UnusableRow(f"a message has the role {role[:40]!r}; known: {', '.join(ROLES)}")
    return ROLES[role]


def content_of(message: JsonObject) -> str:
    contents = [message[key] for key in ("content", "value") if message.get(key) is not None]
    content = next((content for content in contents if not is_missing(content)), next(iter(contents), None))
    if isinstance(content, list):  # OpenAI's content blocks
        return "".join(map(_text_of_block, content))
    if is_missing(content):
        if not message.get("tool_calls"):
            raise UnusableRow(f"a message has no content{' (it is NaN)' if content is not None else ''}")
        return ""
    if not isinstance(content, str):
        raise UnusableRow(f"the content of a message is {json_type(content)}, where text is expected, {BLOCKS}")
    return content


def _text_of_block(block: Json) -> str:
    if not isinstance(block, dict):
        raise UnusableRow(
            f"the content of a message is a list that holds {json_type(block)}; expected is text, {BLOCKS}"
        )
    kind = block.get("type")
    if not isinstance(kind, str):
        raise UnusableRow(f"the content of a message is a list of objects without a type; expected is text, {BLOCKS}")
    if kind != "text":
        raise UnusableRow(f"a message has {kind[:40]} content, and this model has no vision tower")
    return require_string(block.get("text"), "text")


def _from_turns(history: list[Json], query: str, response: str) -> Conversation:
    messages = []
    for turn in [*history, (query, response)]:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise UnusableRow("its history is not a list of [query, response]")
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]
    return from_messages(messages)


def from_messages(rows: list[JsonObject]) -> Conversation:
    messages: list[JsonObject] = []
    weights: list[float | None] = []
    for row in rows:
        role, weight = role_of(row), _weight(row)
        if role == "tool_call":
            call = {"type": "function", "function": _function_call(parse_json(content_of(row), "tool_call"))}
            if messages and messages[-1]["role"] == "assistant":  # one turn has the text and all calls
                messages[-1].setdefault("tool_calls", []).append(call)
                weights[-1] = weight if weights[-1] is None else weights[-1]
                continue
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            message: JsonObject = {"role": role, "content": content_of(row)}
            if calls := _parse_list(row, "tool_calls"):
                message["tool_calls"] = [_tool_call(call) for call in calls]
            for key in ("reasoning_content", "thinking", "name", "tool_call_id"):
                if not is_missing(row.get(key)):
                    message[key] = require_string(row[key], key)
            # Templates read either of these keys.
            if thought := message.get("reasoning_content") or message.get("thinking"):
                for key in ("reasoning_content", "thinking"):
                    message[key] = message.get(key) or thought
        messages.append(message)
        weights.append(weight)
    return Conversation(messages, weights)


def _tool_call(call: Json) -> JsonObject:
    """Return one of a message's `tool_calls` in OpenAI's form."""
    if not isinstance(call, dict):
        raise UnusableRow(f"a tool call is {json_type(call)}, where an object is expected")
    return {**call, "function": _function_call(call.get("function", call))}


def _function_call(call: Json) -> JsonObject:
    """Return a function call with its arguments as a dict, which every chat template takes."""
    if not isinstance(call, dict) or "name" not in call:
        raise UnusableRow("a tool call has no name")
    if not isinstance(call["name"], str):
        raise UnusableRow(f"the name of a tool call is {json_type(call['name'])}, where text is expected")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # some models write free text there
            arguments = json.loads(arguments)
    return {"name": call["name"], "arguments": arguments}


def _weight(message: JsonObject) -> float | None:
    loss = message.get("loss_scale") if is_missing(message.get("loss")) else message["loss"]
    if is_missing(loss):
        return None
    if not isinstance(loss, int | float) or not 0 <= loss < math.inf:
        raise UnusableRow(f"a message's loss is {repr(loss)[:40]}; true, false or a weight is expected")
    return float(loss)


def _unknown_format(row: JsonObject, known: str) -> str:
    return f"no known format: its columns are {', '.join(row) or 'none'}; {known}; --columns renames columns"
