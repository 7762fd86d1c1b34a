"""Placeholders of self-cognition rows, in which a model says its name and its author."""

import re
from collections.abc import Sequence

from ..json_types import Json, JsonObject
from .schemas import MESSAGES, QUERY, RESPONSE

FLAGS = {"{{NAME}}": "--model_name", "{{AUTHOR}}": "--model_author"}
# Columns that may hold a conversation. Others, which only rewards read, are left as they are.
COLUMNS = (
    *QUERY, *RESPONSE, *MESSAGES, "system", "history", "chosen", "rejected", "rejected_messages", "rejected_response",
)  # fmt: skip
LANGUAGE = ("tag", "language", "lang")  # columns that name a row's language
CHINESE = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")


class SelfCognition:
    """Name and author of the model, which replace placeholders in rows.

    names, authors: the Chinese and the English one, or one for both; [] if unset
    """

    def __init__(self, names: Sequence[str], authors: Sequence[str]):
        values = dict(zip(FLAGS, (names, authors), strict=True))
        for placeholder, value in values.items():
            if len(value) > 2:
                raise ValueError(
                    f"{FLAGS[placeholder]} {' '.join(value)}: has {len(value)} values. Set one, or the Chinese and the "
                    "English one."
                )
            if not all(text.strip() for text in value):
                raise ValueError(
                    f"{FLAGS[placeholder]} {' '.join(map(repr, value))}: has an empty text. Set one, or remove it."
                )
        self.values = {placeholder: (value[0], value[-1]) for placeholder, value in values.items() if value}

    def fill(self, row: JsonObject) -> JsonObject:
        """Return a row with its placeholders replaced. Raises ValueError if a value is unset."""
        columns = {name: row[name] for name in COLUMNS if name in row and _placeholders(row[name])}
        if not columns:
            return row
        if unset := sorted({mark for value in columns.values() for mark in _placeholders(value)} - self.values.keys()):
            flags = " and ".join(FLAGS[mark] for mark in unset)
            raise ValueError(
                f"the row has {' and '.join(unset)}, which {flags} would replace. Set --model_name and --model_author "
                f"(to train on the text as it is: {FLAGS[unset[0]]} '{unset[0]}')."
            )
        language = int(not _is_chinese(row, columns))
        texts = {mark: pair[language] for mark, pair in self.values.items()}
        return type(row)(row | {name: _replace(value, texts) for name, value in columns.items()})


def _is_chinese(row: JsonObject, columns: JsonObject) -> bool:
    """Return whether a row says that it is Chinese, or has Chinese characters where it does not say."""
    named = next((row[name].lower() for name in LANGUAGE if isinstance(row.get(name), str)), "")
    return named.startswith("zh") if named.startswith(("zh", "en")) else bool(CHINESE.search(str(columns)))


def _placeholders(value: Json) -> set[str]:
    """Return the placeholders in a nested value."""
    if isinstance(value, str):
        return {mark for mark in FLAGS if mark in value} if "{{" in value else set()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {mark for item in items for mark in _placeholders(item)}


def _replace(value: Json, texts: dict[str, str]) -> Json:
    if isinstance(value, str):
        for mark, text in texts.items():
            value = value.replace(mark, text)
        return value
    if isinstance(value, dict):
        return {key: _replace(item, texts) for key, item in value.items()}
    return [_replace(item, texts) for item in value] if isinstance(value, list) else value
