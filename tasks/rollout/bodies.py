"""Validation of the rollout server's request bodies.

An invalid body is answered with a status of 400 to 499 that explains the problem, and never reaches the engine.
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

MAX_JSON_BYTES = 256 * 2**20  # of a body
JSON_SECONDS = 60.0  # to receive a body
MAX_LETTERS = 200  # of a name
MAX_REQUESTS = 65536  # of one body
PENALTIES = 1e-2, 1e2
SEEDS = -(2**63), 2**64 - 1  # accepted by torch


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
        raise _too_long()
    data = bytearray()
    try:
        async with asyncio.timeout(JSON_SECONDS):
            async for chunk in http.stream():
                data += chunk
                if len(data) > MAX_JSON_BYTES:
                    raise _too_long()
    except TimeoutError:
        raise invalid_request(f"the body did not arrive within {JSON_SECONDS:g} s", 408) from None
    try:
        body = json.loads(data, parse_constant=_no_json)
    except RecursionError:
        raise invalid_request("the body is nested too deeply", 400) from None
    except ValueError as error:  # includes bytes that are not UTF-8
        raise invalid_request(f"the body is not JSON: {error}", 400) from None
    if not isinstance(body, dict):
        raise invalid_request(f"the body is a JSON {_json_type(body)}: send an object")
    return body


def _too_long() -> RequestError:
    return invalid_request(f"the body has more than {MAX_JSON_BYTES} bytes: send it in several requests", 413)


def _no_json(constant: str) -> object:
    raise ValueError(f"{constant} is not a JSON number")


def _json_type(value: object) -> str:
    kinds: dict[type, str] = {list: "array", dict: "object", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


class Fields:
    """Typed access to the fields of a JSON object. Each method raises RequestError, naming the field, for a wrong type.

    `default`: value of an absent field; without one the field is required.
    """

    def __init__(self, body: object, names: Sequence[str], within: str = ""):
        """Check the names of the fields.

        `names`: all allowed fields.
        `within`: the part of the body that the object is, as in "request 3".
        """
        self._prefix = f"{within}: " if within else ""
        if not isinstance(body, dict):
            raise invalid_request(f"{within or 'the body'} is a JSON {_json_type(body)}: send an object")
        if unknown := sorted(set(body) - set(names)):
            raise invalid_request(f"{self._prefix}{unknown[0][:MAX_LETTERS]!r} is unknown. Fields: {', '.join(names)}")
        self._body: JsonObject = body

    def _value(self, name: str, default: object) -> object:
        if name not in self._body and default is ...:
            raise invalid_request(f"{self._prefix}{name} is missing")
        return self._body.get(name, default)

    def _wrong(self, what: str, value: object, must: str) -> RequestError:
        shown = json.dumps(value) if isinstance(value, str | int | float | None) else f"a JSON {_json_type(value)}"
        return invalid_request(f"{self._prefix}{what} is {shown[:MAX_LETTERS]}: it must be {must}")

    def _checked(self, name: str, default: object, is_right: Callable[[object], bool], what: str) -> Any:
        value = self._value(name, default)
        if name in self._body and not is_right(value):
            raise self._wrong(name, value, what)
        return value

    def integer(self, name: str, least: int, most: int | None = None, default: object = ...) -> Any:
        """Return an integer from `least` to `most`; with a `default` of None, null is allowed."""
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"

        def is_right(value: object) -> bool:
            return (value is None and default is None) or _is_integer(value, least, most)

        return self._checked(name, default, is_right, f"a whole number {bounds}")

    def number(self, name: str, least: float, most: float, default: object = ..., also: Sequence[float] = ()) -> float:
        def is_right(value: object) -> bool:
            return _is_number(value) and (least <= value <= most or value in also)

        alternatives = "".join(f"{value:g} or " for value in also)
        return self._checked(name, default, is_right, f"{alternatives}a number from {least:g} to {most:g}")

    def boolean(self, name: str, default: object = ...) -> bool:
        return self._checked(name, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, name: str, default: object = ...) -> str:
        def is_right(value: object) -> bool:
            return isinstance(value, str) and 0 < len(value) <= MAX_LETTERS

        return self._checked(name, default, is_right, f"a text of 1 to {MAX_LETTERS} characters")

    def texts(self, name: str, default: object = ..., most: int | None = None) -> list[str]:
        def is_right(value: object) -> bool:
            if not isinstance(value, list) or (most is not None and len(value) > most):
                return False
            return all(isinstance(item, str) and item for item in value)

        limit = "" if most is None else f"at most {most} "
        return self._checked(name, default, is_right, f"a list of {limit}texts, none of them empty")

    def integers(self, name: str, least: int, most: int | None = None, default: object = ...) -> Any:
        """Return a list of integers; with a `default` of None, null is allowed."""
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        values = self._checked(
            name,
            default,
            lambda value: isinstance(value, list) or (value is None and default is None),
            f"a list of whole numbers {bounds}",
        )
        # Checked as a whole, since a body may have millions of them.
        if values and (
            set(map(type, values)) != {int} or min(values) < least or (most is not None and max(values) > most)
        ):
            wrong = next(value for value in values if not _is_integer(value, least, most))
            raise self._wrong(f"an item of {name}", wrong, f"a whole number {bounds}")
        return values

    def items(self, name: str, most: int) -> list[Json]:
        def is_right(value: object) -> bool:
            return isinstance(value, list) and 0 < len(value) <= most

        return self._checked(name, ..., is_right, f"a list of 1 to {most} items")

    def invalid_request(self, text: str) -> RequestError:
        return invalid_request(f"{self._prefix}{text}")

    def raw(self, name: str, default: object = ...) -> Any:
        """Return the value without checks."""
        return self._value(name, default)


def _is_integer(value: object, least: int, most: int | None) -> bool:
    return type(value) is int and value >= least and (most is None or value <= most)


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)  # pyright: ignore[reportArgumentType]


def printable(text: str) -> str:
    """Return a client's text without characters that control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class Limits:
    """Limits of the model: tokens below `vocab_size`, at most `positions` tokens; None where unknown."""

    def __init__(self, vocab_size: int | None, positions: int | None):
        self.vocab_size, self.positions = vocab_size, positions

    def tokens(self, fields: Fields, *, room: int) -> list[int]:
        """Return the field `tokens`: not empty, and with room for `room` more."""
        tokens = fields.integers("tokens", 0, None if self.vocab_size is None else self.vocab_size - 1)
        if not tokens:
            raise fields.invalid_request("tokens is empty")
        if self.positions is not None and len(tokens) + room > self.positions:
            new = f" and {room} new one" if room else ""
            raise fields.invalid_request(
                f"{len(tokens)} tokens{new} are too many: the model has {self.positions} positions"
            )
        return tokens

    def generation(self, body: JsonObject) -> tuple[list[Request], Sampling]:
        """Return the requests and sampling of a body of /generate. A completion ends at the model's last position."""
        fields = Fields(body, ("requests", "sampling", "version"))
        sampling = self._sampling(fields.raw("sampling"))
        requests = []
        for number, item in enumerate(fields.items("requests", MAX_REQUESTS)):
            item_fields = Fields(item, ("tokens", "seed", "max_new_tokens"), f"request {number}")
            tokens = self.tokens(item_fields, room=1)
            limit = item_fields.integer("max_new_tokens", 1, self.positions, None)
            if self.positions is not None:
                limit = min(limit or sampling.max_new_tokens, self.positions - len(tokens))
            requests.append(Request(tokens, item_fields.integer("seed", *SEEDS), limit))
        return requests, sampling

    def _sampling(self, item: Json) -> Sampling:
        default = Sampling()
        fields = Fields(item, tuple(Sampling.__dataclass_fields__), "sampling")
        ends = fields.integers("ends", 0, None, None)  # unbounded: a tokenizer may have ids beyond the model's
        return Sampling(
            temperature=fields.number("temperature", *TEMPERATURES, default.temperature, also=(0,)),
            top_p=fields.number("top_p", 1e-6, 1.0, default.top_p),
            top_k=fields.integer("top_k", -1, None, default.top_k),
            repetition_penalty=fields.number("repetition_penalty", *PENALTIES, default.repetition_penalty),
            max_new_tokens=fields.integer("max_new_tokens", 1, self.positions, self._default_length(default)),
            stop=tuple(fields.texts("stop", [], 64)),
            experts=fields.boolean("experts", default.experts),
            ends=None if ends is None else tuple(ends),
        )

    def _default_length(self, default: Sampling) -> int:
        return min(default.max_new_tokens, self.positions or default.max_new_tokens)
