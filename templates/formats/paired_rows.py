"""Conversion of rows with several conversations or a label.

- preference: any conversation that ends with an answer, and the rejected one as `rejected_response` or a full
  conversation as `rejected_messages`; or TRL's `prompt`, `chosen`, `rejected`; optionally a `margin`
- kto: a conversation that ends with an answer, and `label`
- answered, asked: a conversation that ends with an answer or (asked) with a question
- seq_cls: a conversation or a `text`, and `label`
- embedding, reranker: `messages`, `positive_messages`, `negative_messages`, or texts as `anchor` or `query`,
  `positive`, `negative`; or one positive and a `label`
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ..json_types import Json, JsonObject
from .medium import Medium
from .schemas import (
    MESSAGES,
    QUERY,
    RESPONSE,
    Conversation,
    UnusableRow,
    content_of,
    from_messages,
    is_empty_answer,
    message_list,
    parse_json,
    require_string,
    require_text_only,
    role_of,
    to_conversation,
    with_columns,
)

BINARY = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


class Passage(NamedTuple):
    """Text with the system prompt before it, or ""."""

    system: str
    text: str
    media: Sequence[Medium] = ()  # in the order of their sentinels in system and text


class ContrastiveRow(NamedTuple):
    """Text or query, with similar or relevant texts, and with others."""

    anchor: Passage
    positives: list[Passage]
    negatives: list[Passage]


def to_pair(row: JsonObject, *, shares_texts: bool = False) -> tuple[Conversation, Conversation]:
    """Return the conversations with the chosen and the rejected answer.

    shares_texts: without a rejected answer the conversations are equal, because their images differ
    """
    row = require_text_only(row)
    if "chosen" in row and "rejected" in row:
        chosen, rejected = _conversation(row, "chosen"), _conversation(row, "rejected")
        return _with_answer(chosen, "its chosen answer"), _with_answer(rejected, "its rejected answer")
    chosen = _with_answer(to_conversation(row), "its chosen answer")
    if "rejected_messages" in row:
        rejected = with_columns(from_messages(message_list(row, ("rejected_messages",)) or []), row)
    elif "rejected_response" in row:
        rejected = _replace_answer(chosen, row["rejected_response"])
    elif shares_texts:
        rejected = replace(chosen)
    else:
        raise UnusableRow(
            "it has no rejected answer: add rejected_response or rejected_messages, or prompt, chosen and rejected"
        )
    return chosen, _with_answer(rejected, "its rejected answer")


def to_answer(row: JsonObject) -> Conversation:
    """Return a conversation that ends with an answer."""
    row = require_text_only(row)
    conversation = _conversation(row, "completion") if isinstance(row.get("completion"), list) else to_conversation(row)
    return _with_answer(conversation, "its answer")


def to_answered(row: JsonObject, *, is_required: bool) -> Conversation | None:
    """Return a conversation that ends with an answer, or None. Raises UnusableRow if an answer is needed."""
    conversation = to_conversation(row, answered=False)
    last = conversation.messages[-1]
    if last["role"] == "assistant" and not is_empty_answer(last):
        return conversation
    if is_required:
        raise UnusableRow("it has no answer: add one, or use --lmbda 1 or --seq_kd true")
    return None


def to_contrastive(row: JsonObject) -> ContrastiveRow:
    """Return the texts of a row for embeddings or rerankers."""
    row = require_text_only(row)
    if messages := message_list(row, MESSAGES):
        anchor = _passage(messages, "messages")
    elif column := next((column for column in ("anchor", "query") if column in row), None):
        anchor = _passage([{"role": "user", "content": require_string(row[column], column)}], column)
    else:
        raise UnusableRow(f"it has no text to compare: its columns are {', '.join(row)}; add messages, anchor or query")
    if row.get("system") and not anchor.system:
        anchor = anchor._replace(system=require_string(row["system"], "system"))
    positives, negatives = _passages(row, "positive"), _passages(row, "negative")
    if not positives:
        raise UnusableRow("it has no positive text: add positive_messages or positive")
    return ContrastiveRow(anchor, positives, negatives)


def label_of_pair(row: JsonObject, contrastive: ContrastiveRow, *columns: str) -> Json:
    """Return the label of a row that compares two texts, or None."""
    label = next((row[column] for column in columns if row.get(column) is not None), None)
    if label is not None and (len(contrastive.positives) > 1 or contrastive.negatives):
        raise UnusableRow("it has a label, which is for one positive text and no negatives")
    return label


def parse_binary(label: Json) -> float:
    """Convert true, false, 1 or 0, also as text (CSV), to a float."""
    if label is None:
        raise UnusableRow("it has no label: true, false, 1 or 0 is expected")
    if (value := BINARY.get(str(label).lower())) is None:
        raise UnusableRow(f"its label is {_brief(label)}, where true, false, 1 or 0 is expected")
    return value


def parse_numbers(value: Json, column: str) -> list[float]:
    """Convert a number or a list of numbers, also as text (CSV), to floats."""
    if value is None:
        raise UnusableRow(f"it has no {column}: a number or a list of numbers is expected")
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    values = value if isinstance(value, list) else [value]
    finite = [float(item) for item in values if isinstance(item, int | float) and math.isfinite(item)]
    if len(finite) < len(values):
        raise UnusableRow(f"its {column} is {_brief(value)}, where a number or a list of numbers is expected")
    return finite


def parse_number(value: Json, column: str) -> float:
    values = parse_numbers(value, column)
    if len(values) != 1:
        raise UnusableRow(f"its {column} is {_brief(value)}, where one number is expected")
    return values[0]


def _brief(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _with_answer(conversation: Conversation, name: str) -> Conversation:
    """Return the conversation. Raises UnusableRow, with `name`, if it does not end with an answer."""
    last = conversation.messages[-1]
    if last["role"] != "assistant":
        raise UnusableRow(f"{name} is missing: the last message is of the role {last['role']}")
    if is_empty_answer(last):
        raise UnusableRow(f"{name} is empty")
    return conversation


def _replace_answer(conversation: Conversation, answer: Json) -> Conversation:
    """Return the conversation with another answer: the text of the last message, or all messages after the user's."""
    messages, weights = conversation.messages, conversation.weights
    if isinstance(answer, list):
        replacement = from_messages(message_list({"rejected_response": answer}, ("rejected_response",)) or [])
        keep = 1 + max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    else:
        text = require_string(answer, "rejected_response")
        replacement = Conversation([{"role": "assistant", "content": text}], weights[-1:])
        keep = len(messages) - 1
    return Conversation(
        messages[:keep] + replacement.messages,
        weights[:keep] + replacement.weights,
        conversation.tools,
        conversation.template_kwargs,
    )


def _conversation(row: JsonObject, column: str) -> Conversation:
    """Return the conversation of a column: a whole one, or an answer (text or messages) to the row's prompt."""
    answer = row[column]
    if not isinstance(answer, list):
        answer = [
            answer if isinstance(answer, dict) else {"role": "assistant", "content": require_string(answer, column)}
        ]
    messages = message_list({column: answer}, (column,)) or []
    if role_of(messages[0]) in ("system", "user"):
        before = []
    elif prompt := message_list(row, ("prompt", *MESSAGES) if isinstance(row.get("prompt"), list) else MESSAGES):
        before = prompt
    elif any(query in row for query in QUERY):
        others = {other: value for other, value in row.items() if other not in RESPONSE}
        query = {"query": row["prompt"]} if "prompt" in row else {}
        before = to_conversation({**query, **others, "response": ""}).messages[:-1]
    else:
        raise UnusableRow(f"it has no prompt before its {column}")
    return with_columns(from_messages([*before, *messages]), row)


def _passages(row: JsonObject, kind: str) -> list[Passage]:
    """Return the positive or negative texts of a row: lists of messages, a text, or several texts."""
    column = f"{kind}_messages"
    if value := parse_json(row.get(column), column):
        conversations = value if isinstance(value, list) and all(isinstance(item, list) for item in value) else [value]
        lists = [message_list({column: messages}, (column,)) or [] for messages in conversations]
    else:
        texts = row.get(kind, [])
        lists = [
            [{"role": "user", "content": require_string(text, kind)}]
            for text in (texts if isinstance(texts, list) else [texts])
        ]
        column = kind
    return [_passage(messages, column) for messages in lists]


def _passage(messages: list[JsonObject], column: str) -> Passage:
    *before, last = messages
    if len(before) > 1 or any(role_of(message) != "system" for message in before):
        raise UnusableRow(
            f"its {column} holds {len(messages)} messages, where one is expected, optionally after a system message"
        )
    role_of(last)
    if not (text := content_of(last)).strip():
        raise UnusableRow(f"its {column} is empty")
    return Passage("".join(content_of(message) for message in before), text)
