"""Typed access to the JSON objects of the rollout server's request bodies."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from ...templates.json_types import Json, JsonObject

MAX_LETTERS = 200  # per text field


class RequestError(Exception):
    """Error response to the client: status, `kind` and text."""

    def __init__(self, status: int, kind: str, text: str):
        super().__init__(text)
        self.status, self.kind = status, kind


def invalid_request(text: str, status: int = 422) -> RequestError:
    return RequestError(status, "request", text)


def json_type(value: object) -> str:
    """Return the JSON type of a parsed value."""
    kinds: dict[type, str] = {list: "array", dict: "object", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


class Fields:
    """Typed access to the fields of a JSON object. Its methods raise RequestError, naming the field, if it is invalid.

    `default`: value of an absent field; without a default the field is required.
    """

    def __init__(self, body: object, names: Sequence[str], part: str = ""):
        """Check the names of the fields.

        `names`: all allowed fields.
        `part`: name of the object within the body, as in "request 3".
        """
        self._prefix = f"{part}: " if part else ""
        if not isinstance(body, dict):
            raise invalid_request(f"{part or 'the body'} is a JSON {json_type(body)}: send an object")
        if unknown := sorted(set(body) - set(names)):
            raise invalid_request(f"{self._prefix}{unknown[0][:MAX_LETTERS]!r} is unknown. Fields: {', '.join(names)}")
        self._body: JsonObject = body

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def _value(self, name: str, default: object) -> object:
        if name not in self._body and default is ...:
            raise invalid_request(f"{self._prefix}{name} is missing")
        return self._body.get(name, default)

    def _invalid_field(self, field: str, value: object, requirement: str) -> RequestError:
        shown = json.dumps(value) if isinstance(value, str | int | float | None) else f"a JSON {json_type(value)}"
        return invalid_request(f"{self._prefix}{field} is {shown[:MAX_LETTERS]}: it must be {requirement}")

    def _check_field(self, name: str, default: object, is_valid: Callable[[object], bool], requirement: str) -> Any:
        value = self._value(name, default)
        if name in self._body and not is_valid(value):
            raise self._invalid_field(name, value, requirement)
        return value

    def integer(self, name: str, minimum: int, maximum: int | None = None, default: object = ...) -> Any:
        """Return an integer from `minimum` to `maximum`. With a `default` of None, null is allowed."""
        bounds = f"from {minimum} to {maximum}" if maximum is not None else f"of at least {minimum}"

        def is_valid(value: object) -> bool:
            return (value is None and default is None) or _is_integer(value, minimum, maximum)

        return self._check_field(name, default, is_valid, f"a whole number {bounds}")

    def number(
        self, name: str, minimum: float, maximum: float, default: object = ..., extra_values: Sequence[float] = ()
    ) -> float:
        def is_valid(value: object) -> bool:
            return _is_number(value) and (minimum <= value <= maximum or value in extra_values)

        alternatives = "".join(f"{value:g} or " for value in extra_values)
        return self._check_field(name, default, is_valid, f"{alternatives}a number from {minimum:g} to {maximum:g}")

    def boolean(self, name: str, default: object = ...) -> bool:
        return self._check_field(name, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, name: str, default: object = ...) -> str:
        def is_valid(value: object) -> bool:
            return isinstance(value, str) and 0 < len(value) <= MAX_LETTERS

        return self._check_field(name, default, is_valid, f"a text of 1 to {MAX_LETTERS} characters")

    def texts(self, name: str, default: object = ..., maximum: int | None = None) -> list[str]:
        def is_valid(value: object) -> bool:
            if not isinstance(value, list) or (maximum is not None and len(value) > maximum):
                return False
            return all(isinstance(item, str) and item for item in value)

        limit = "" if maximum is None else f"at most {maximum} "
        return self._check_field(name, default, is_valid, f"a list of {limit}texts, none of them empty")

    def integers(self, name: str, minimum: int, maximum: int | None = None, default: object = ...) -> Any:
        """Return a list of integers. With a `default` of None, null is allowed."""
        bounds = f"from {minimum} to {maximum}" if maximum is not None else f"of at least {minimum}"
        values = self._check_field(
            name,
            default,
            lambda value: isinstance(value, list) or (value is None and default is None),
            f"a list of whole numbers {bounds}",
        )
        # The whole list is checked at once: a body may have millions of integers.
        if values and (
            set(map(type, values)) != {int} or min(values) < minimum or (maximum is not None and max(values) > maximum)
        ):
            invalid = next(value for value in values if not _is_integer(value, minimum, maximum))
            raise self._invalid_field(f"an item of {name}", invalid, f"a whole number {bounds}")
        return values

    def items(self, name: str, maximum: int) -> list[Json]:
        def is_valid(value: object) -> bool:
            return isinstance(value, list) and 0 < len(value) <= maximum

        return self._check_field(name, ..., is_valid, f"a list of 1 to {maximum} items")

    def invalid_request(self, text: str) -> RequestError:
        return invalid_request(f"{self._prefix}{text}")

    def raw(self, name: str, default: object = ...) -> Any:
        """Return the value without checks."""
        return self._value(name, default)


def _is_integer(value: object, minimum: int, maximum: int | None) -> bool:
    return type(value) is int and value >= minimum and (maximum is None or value <= maximum)


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)  # pyright: ignore[reportArgumentType]
