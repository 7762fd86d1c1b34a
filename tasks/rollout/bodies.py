"""Validation of the rollout server's request bodies.

An invalid body gets a response of status 400 to 499 that explains the problem. It never reaches the engine.
"""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from fastapi import Request as Http

from ...templates.json_types import Json, JsonObject
from ..options.groups import TEMPERATURES
from .engine import Request, Sampling

MAX_JSON_BYTES = 256 * 2**20  # per body
JSON_SECONDS = 60.0  # to receive a body
MAX_LETTERS = 200  # per text field
MAX_REQUESTS = 65536  # per body
PENALTIES = 1e-2, 1e2  # bounds
SEEDS = -(2**63), 2**64 - 1  # bounds that torch accepts


class RequestError(Exception):
    """Error response to the client: status, `kind` and text."""

    def __init__(self, status: int, kind: str, text: str):
        super().__init__(text)
        self.status, self.kind = status, kind


def invalid_request(text: str, status: int = 422) -> RequestError:
    return RequestError(status, "request", text)


def client_gone() -> RequestError:
    return RequestError(499, "gone", "the client has disconnected")


async def json_body(http: Http) -> JsonObject:
    """Return the JSON object of a request. Raises RequestError."""
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise invalid_request(
            f"content-type {content_type or '(none)'}: send JSON, with content-type: application/json", 415
        )
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_JSON_BYTES:
        raise _body_too_long()
    data = bytearray()
    try:
        async with asyncio.timeout(JSON_SECONDS):
            async for chunk in http.stream():
                data += chunk
                if len(data) > MAX_JSON_BYTES:
                    raise _body_too_long()
    except TimeoutError:
        raise invalid_request(f"the body did not arrive within {JSON_SECONDS:g} s", 408) from None
    try:
        body = json.loads(data, parse_constant=_reject_constant)
    except RecursionError:
        raise invalid_request("the body is nested too deeply", 400) from None
    except ValueError as error:  # includes bytes that are not UTF-8
        raise invalid_request(f"the body is not JSON: {error}", 400) from None
    if not isinstance(body, dict):
        raise invalid_request(f"the body is a JSON {_json_type(body)}: send an object")
    return body


def _body_too_long() -> RequestError:
    return invalid_request(f"the body has more than {MAX_JSON_BYTES} bytes: send it in several requests", 413)


def _reject_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not a JSON number")


def _json_type(value: object) -> str:
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
            raise invalid_request(f"{part or 'the body'} is a JSON {_json_type(body)}: send an object")
        if unknown := sorted(set(body) - set(names)):
            raise invalid_request(f"{self._prefix}{unknown[0][:MAX_LETTERS]!r} is unknown. Fields: {', '.join(names)}")
        self._body: JsonObject = body

    def _value(self, name: str, default: object) -> object:
        if name not in self._body and default is ...:
            raise invalid_request(f"{self._prefix}{name} is missing")
        return self._body.get(name, default)

    def _invalid_field(self, field: str, value: object, requirement: str) -> RequestError:
        shown = json.dumps(value) if isinstance(value, str | int | float | None) else f"a JSON {_json_type(value)}"
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


def printable(text: str) -> str:
    """Return a client's text with `?` for characters that could control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class Limits:
    """Limits of the model: token ids below `vocab_size`, at most `positions` tokens. None if unknown."""

    def __init__(self, vocab_size: int | None, positions: int | None):
        self.vocab_size, self.positions = vocab_size, positions

    def tokens(self, fields: Fields, *, new_tokens: int) -> list[int]:
        """Return the field `tokens`. It is not empty, and leaves space for `new_tokens` more."""
        tokens = fields.integers("tokens", 0, None if self.vocab_size is None else self.vocab_size - 1)
        if not tokens:
            raise fields.invalid_request("tokens is empty")
        if self.positions is not None and len(tokens) + new_tokens > self.positions:
            new_text = f" and {new_tokens} new one" if new_tokens else ""
            raise fields.invalid_request(
                f"{len(tokens)} tokens{new_text} are too many: the model has {self.positions} positions"
            )
        return tokens

    def generation(self, body: JsonObject) -> tuple[list[Request], Sampling]:
        """Return requests and sampling settings of a /generate body. Completions end at the model's last position."""
        fields = Fields(body, ("requests", "sampling", "version"))
        sampling = self._sampling(fields.raw("sampling"))
        requests = []
        for number, item in enumerate(fields.items("requests", MAX_REQUESTS)):
            item_fields = Fields(item, ("tokens", "seed", "max_new_tokens"), f"request {number}")
            tokens = self.tokens(item_fields, new_tokens=1)
            limit = item_fields.integer("max_new_tokens", 1, self.positions, None)
            if self.positions is not None:
                limit = min(limit or sampling.max_new_tokens, self.positions - len(tokens))
            requests.append(Request(tokens, item_fields.integer("seed", *SEEDS), limit))
        return requests, sampling

    def _sampling(self, item: Json) -> Sampling:
        default = Sampling()
        fields = Fields(item, tuple(Sampling.__dataclass_fields__), "sampling")
        # No upper bound: a tokenizer may have ids beyond the model's vocabulary.
        ends = fields.integers("ends", 0, None, None)
        return Sampling(
            temperature=fields.number("temperature", *TEMPERATURES, default.temperature, extra_values=(0,)),
            top_p=fields.number("top_p", 1e-6, 1.0, default.top_p),
            top_k=fields.integer("top_k", -1, None, default.top_k),
            repetition_penalty=fields.number("repetition_penalty", *PENALTIES, default.repetition_penalty),
            max_new_tokens=fields.integer("max_new_tokens", 1, self.positions, self._default_length(default)),
            stop=tuple(fields.texts("stop", [], 64)),
            experts=fields.boolean("experts", default.experts),
            ends=None if ends is None else tuple(ends),
            min_p=fields.number("min_p", 0.0, 1.0, default.min_p),
        )

    def _default_length(self, default: Sampling) -> int:
        return min(default.max_new_tokens, self.positions or default.max_new_tokens)
