"""Columns of rows: new names, and values within nested columns by dotted names."""

import json
from collections.abc import Iterator, Mapping

from ..json_types import Json, JsonObject


def apply_names(row: JsonObject, columns: Mapping[str, str]) -> JsonObject:
    """Return a row with its columns renamed as in --columns.

    A dotted name that is no column itself copies a value of a nested column: `reward_model.ground_truth`.
    """
    result = {columns.get(name, name): value for name, value in row.items()}
    for name, target in columns.items():
        if name not in row and (nested := nested_value(row, name)) is not None:
            result[target] = nested
    return type(row)(result)


def has_column(row: JsonObject, name: str) -> bool:
    """Return whether a row has a column, or a value of a nested one by its dotted name."""
    return name in row or nested_value(row, name) is not None


def nested_value(row: JsonObject, name: str) -> Json:
    """Return the value of a nested column by its dotted name; None if there is none."""
    first, dot, path = name.partition(".")
    if not dot or first not in row:
        return None
    table = parsed_object(row[first])
    return table[path] if path in table else nested_value(table, path)


def nested_names(row: JsonObject) -> Iterator[str]:
    """Yield the columns of a row, and the values within its nested columns by dotted names."""
    for name, value in row.items():
        yield name
        yield from (f"{name}.{inner}" for inner in nested_names(parsed_object(value)))


def parsed_object(value: Json) -> JsonObject:
    """Return an object that may be written as JSON (CSV); {} for any other value."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return {}
    value = parsed_json(value)
    return value if isinstance(value, dict) else {}


def parsed_json(value: Json) -> Json:
    """Return a value that may be written as JSON; None for other text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
