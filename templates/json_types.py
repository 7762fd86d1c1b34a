"""Types of parsed JSON and of objects stored as JSON."""

from typing import Any

type Json = bool | int | float | str | list[Json] | JsonObject | None
type JsonObject = dict[str, Any]  # a row of a dataset, a message, config.json, a saved position
