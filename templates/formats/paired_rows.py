"""Rows that hold more than one conversation: pairs of answers, answers and texts with a label, texts to compare.

- preference: any conversation that ends with an answer, with the rejected one as `rejected_response` or a whole
  conversation as `rejected_messages`; or TRL's `prompt`, `chosen`, `rejected`; and perhaps a `margin`
- kto: a conversation that ends with an answer, and `label`
- answered, asked: a conversation that ends with an answer, or (asked) with what is to be answered
- seq_cls: a conversation or a `text`, and `label`
- embedding, reranker: `messages`, `positive_messages`, `negative_messages`, or texts as `anchor` or `query`,
  `positive`, `negative`; or one positive and a `label`
"""

import json
import math
from contextlib import suppress
from typing import Any, NamedTuple

from .schemas import (
    MESSAGES,
    QUERY,
    RESPONSE,
    Conversation,
    UnusableRow,
    content_of,
    from_json,
    from_messages,
    message_list,
    role_of,
    says_nothing,
    string,
    text_only,
    to_conversation,
    with_columns,
)

BINARY = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


class Passage(NamedTuple):
    """A text, and the system prompt before it ("": none)."""

    system: str
    text: str


class Comparison(NamedTuple):
    """A text (or query), and those that are to be like it (or relevant to it) or not."""

    anchor: Passage
    positives: list[Passage]
    negatives: list[Passage]


def to_pair(row: dict[str, Any]) -> tuple[Conversation, Conversation]:
    """The conversation with the chosen answer, and that with the rejected one."""
    row = text_only(row)
    if "chosen" in row and "rejected" in row:
        chosen, rejected = _answered(row, "chosen"), _answered(row, "rejected")
        return _with_answer(chosen, "its chosen answer"), _with_answer(rejected, "its rejected answer")
    chosen = _with_answer(to_conversation(row), "its chosen answer")
    if "rejected_messages" in row:
        rejected = with_columns(from_messages(message_list(row, ("rejected_messages",)) or []), row)
    elif "rejected_response" in row:
        rejected = _instead(chosen, row["rejected_response"])
    else:
        raise UnusableRow(
            "it has no rejected answer: give rejected_response or rejected_messages, or prompt, chosen and rejected"
        )
    return chosen, _with_answer(rejected, "its rejected answer")


def to_answer(row: dict[str, Any]) -> Conversation:
    """A conversation that ends with an answer."""
    row = text_only(row)
    conversation = _answered(row, "completion") if isinstance(row.get("completion"), list) else to_conversation(row)
    return _with_answer(conversation, "its answer")


def to_answered(row: dict[str, Any], *, needed: bool) -> Conversation | None:
    """A conversation that ends with an answer; None where there is no answer to what it asks, unless it is `needed`."""
    conversation = to_conversation(row, answered=False)
    last = conversation.messages[-1]
    if last["role"] == "assistant" and not says_nothing(last):
        return conversation
    if needed:
        raise UnusableRow("it has no answer: without one it is for --lmbda 1 or --seq_kd true")
    return None


def to_comparison(row: dict[str, Any]) -> Comparison:
    """The texts of a row to compare."""
    row = text_only(row)
    if messages := message_list(row, MESSAGES):
        anchor = _passage(messages, "messages")
    elif column := next((column for column in ("anchor", "query") if column in row), None):
        anchor = _passage([{"role": "user", "content": string(row[column], column)}], column)
    else:
        raise UnusableRow(
            f"it has no text to compare: its columns are {', '.join(row)}; give messages, anchor or query"
        )
    if row.get("system") and not anchor.system:
        anchor = anchor._replace(system=string(row["system"], "system"))
    positives, negatives = _passages(row, "positive"), _passages(row, "negative")
    if not positives:
        raise UnusableRow("it has no positive text: give positive_messages or positive")
    return Comparison(anchor, positives, negatives)


def label_of_one(row: dict[str, Any], comparison: Comparison, *columns: str) -> Any:
    """The label of a row that compares two texts; None where it has none."""
    label = next((row[column] for column in columns if row.get(column) is not None), None)
    if label is not None and (len(comparison.positives) > 1 or comparison.negatives):
        raise UnusableRow("it has a label, which is for one positive text and no negatives")
    return label


def binary(label: Any) -> float:
    """True, false, 1 or 0, or one of these as text (CSV)."""
    if label is None:
        raise UnusableRow("it has no label: true, false, 1 or 0 is expected")
    if (value := BINARY.get(str(label).lower())) is None:
        raise UnusableRow(f"its label is {_brief(label)}, where true, false, 1 or 0 is expected")
    return value


def numbers(value: Any, column: str) -> list[float]:
    """A number or a list of numbers, or one of these as text (CSV)."""
    if value is None:
        raise UnusableRow(f"it has no {column}: a number or a list of numbers is expected")
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in values):
        raise UnusableRow(f"its {column} is {_brief(value)}, where a number or a list of numbers is expected")
    return [float(number) for number in values]


def number(value: Any, column: str) -> float:
    found = numbers(value, column)
    if len(found) != 1:
        raise UnusableRow(f"its {column} is {_brief(value)}, where one number is expected")
    return found[0]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _with_answer(conversation: Conversation, what: str) -> Conversation:
    """The conversation, which must end with an answer."""
    last = conversation.messages[-1]
    if last["role"] != "assistant":
        raise UnusableRow(f"{what} is missing: the last message is of the role {last['role']}")
    if says_nothing(last):
        raise UnusableRow(f"{what} is empty")
    return conversation


def _instead(conversation: Conversation, answer: Any) -> Conversation:
    """The conversation with another answer: a text for its last message, or messages for all after the last user's."""
    messages, weights = conversation.messages, conversation.weights
    if isinstance(answer, list):
        said = from_messages(message_list({"rejected_response": answer}, ("rejected_response",)) or [])
        keep = 1 + max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    else:
        text = string(answer, "rejected_response")
        said, keep = Conversation([{"role": "assistant", "content": text}], weights[-1:]), len(messages) - 1
    return Conversation(
        messages[:keep] + said.messages, weights[:keep] + said.weights, conversation.tools, conversation.template_kwargs
    )


def _answered(row: dict[str, Any], column: str) -> Conversation:
    """The conversation whose answer (a text, or messages) is in this column: after a prompt, or whole."""
    answer = row[column]
    if not isinstance(answer, list):
        answer = [answer if isinstance(answer, dict) else {"role": "assistant", "content": string(answer, column)}]
    said = message_list({column: answer}, (column,)) or []
    if role_of(said[0]) in ("system", "user"):
        before = []
    elif prompt := message_list(row, ("prompt", *MESSAGES) if isinstance(row.get("prompt"), list) else MESSAGES):
        before = prompt
    elif any(query in row for query in QUERY):
        asked = {other: value for other, value in row.items() if other not in RESPONSE}
        named = {"query": row["prompt"]} if "prompt" in row else {}
        before = to_conversation({**named, **asked, "response": ""}).messages[:-1]
    else:
        raise UnusableRow(f"it has no prompt before its {column}")
    return with_columns(from_messages([*before, *said]), row)


def _passages(row: dict[str, Any], kind: str) -> list[Passage]:
    """The positive or negative texts: lists of messages, a text, or several."""
    column = f"{kind}_messages"
    if found := from_json(row.get(column), column):
        several = isinstance(found, list) and all(isinstance(messages, list) for messages in found)
        lists = [message_list({column: messages}, (column,)) or [] for messages in (found if several else [found])]
    else:
        texts = row.get(kind, [])
        lists = [
            [{"role": "user", "content": string(text, kind)}]
            for text in (texts if isinstance(texts, list) else [texts])
        ]
        column = kind
    return [_passage(messages, column) for messages in lists]


def _passage(messages: list[dict], column: str) -> Passage:
    *before, last = messages
    if len(before) > 1 or any(role_of(message) != "system" for message in before):
        raise UnusableRow(
            f"its {column} holds {len(messages)} messages, where one is expected, or one after a system's"
        )
    role_of(last)
    if not (text := content_of(last)).strip():
        raise UnusableRow(f"its {column} is empty")
    return Passage("".join(content_of(message) for message in before), text)
