"""Bodies of requests to the rollout server, checked before anything is done with them: a client's fault is an answer
of status 400 to 499 that says what is wrong, and never reaches the engine."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Request as Http

from ..options.groups import TEMPERATURES
from .engine import Request, Sampling

JSON_BYTES = 256 * 2**20  # of a body at most
JSON_SECONDS = 60.0  # within which a body is to come
LETTERS = 200  # of a name at most
REQUESTS = 65536  # of one body at most
PENALTIES = 1e-2, 1e2
SEEDS = -(2**63), 2**64 - 1  # that torch takes


class Refused(Exception):
    """What the client is told: status, `kind` and text."""

    def __init__(self, status: int, kind: str, text: str):
        super().__init__(text)
        self.status, self.kind = status, kind


def fault(text: str, status: int = 422) -> Refused:
    return Refused(status, "request", text)


def gone() -> Refused:
    return Refused(499, "gone", "the client has gone")


async def json_body(http: Http) -> dict[str, Any]:
    """The JSON object that a client sent. Raises Refused."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise fault(f"content-type {kind or '(none)'}: send JSON, with content-type: application/json", 415)
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > JSON_BYTES:
        raise _too_long()
    data = bytearray()
    try:
        async with asyncio.timeout(JSON_SECONDS):
            async for chunk in http.stream():
                data += chunk
                if len(data) > JSON_BYTES:
                    raise _too_long()
    except TimeoutError:
        raise fault(f"the body has not come within {JSON_SECONDS:g} s", 408) from None
    try:
        body = json.loads(data, parse_constant=_no_json)
    except RecursionError:
        raise fault("the body is nested too deeply", 400) from None
    except ValueError as error:  # also of bytes that are no UTF-8
        raise fault(f"the body is not JSON: {error}", 400) from None
    if not isinstance(body, dict):
        raise fault(f"the body is a JSON {_kind(body)}: send an object")
    return body


def _too_long() -> Refused:
    return fault(f"the body has more than {JSON_BYTES} bytes: send it in several requests", 413)


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no number in JSON")


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {list: "array", dict: "object", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


class Fields:
    """Values of a JSON object by name. Each method raises Refused, naming the field, for a value of another kind.

    `default`: for a field that is absent; without one it is required.
    """

    def __init__(self, body: Any, names: Sequence[str], within: str = ""):
        """`names`: all that the object may have. `within`: what it is a part of, as in "request 3"."""
        self._body, self._where = body, f"{within}: " if within else ""
        if not isinstance(body, dict):
            raise fault(f"{within or 'the body'} is a JSON {_kind(body)}: send an object")
        if unknown := sorted(set(body) - set(names)):
            raise fault(f"{self._where}{unknown[0][:LETTERS]!r} is unknown. Fields: {', '.join(names)}")

    def _value(self, name: str, default: Any) -> Any:
        if name not in self._body and default is ...:
            raise fault(f"{self._where}{name} is missing")
        return self._body.get(name, default)

    def _wrong(self, what: str, value: Any, must: str) -> Refused:
        shown = json.dumps(value) if isinstance(value, str | int | float | None) else f"a JSON {_kind(value)}"
        return fault(f"{self._where}{what} is {shown[:LETTERS]}: it must be {must}")

    def _checked(self, name: str, default: Any, is_right: Callable[[Any], bool], what: str) -> Any:
        value = self._value(name, default)
        if name in self._body and not is_right(value):
            raise self._wrong(name, value, what)
        return value

    def integer(self, name: str, least: int, most: int | None = None, default: Any = ...) -> Any:
        """`default` None: null is allowed too."""
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"

        def is_right(value: Any) -> bool:
            return (value is None and default is None) or _is_integer(value, least, most)

        return self._checked(name, default, is_right, f"a whole number {bounds}")

    def number(self, name: str, least: float, most: float, default: Any = ..., also: Sequence[float] = ()) -> Any:
        def is_right(value: Any) -> bool:
            return _is_number(value) and (least <= value <= most or value in also)

        others = "".join(f"{each:g} or " for each in also)
        return self._checked(name, default, is_right, f"{others}a number from {least:g} to {most:g}")

    def boolean(self, name: str, default: Any = ...) -> Any:
        return self._checked(name, default, lambda value: isinstance(value, bool), "true or false")

    def text(self, name: str, default: Any = ...) -> Any:
        def is_right(value: Any) -> bool:
            return isinstance(value, str) and 0 < len(value) <= LETTERS

        return self._checked(name, default, is_right, f"a text of 1 to {LETTERS} characters")

    def texts(self, name: str, default: Any = ..., most: int | None = None) -> Any:
        def is_right(value: Any) -> bool:
            fits = isinstance(value, list) and (most is None or len(value) <= most)
            return fits and all(isinstance(item, str) and item for item in value)

        number = "" if most is None else f"at most {most} "
        return self._checked(name, default, is_right, f"a list of {number}texts, none of them empty")

    def integers(self, name: str, least: int, most: int | None = None, default: Any = ...) -> Any:
        """`default` None: null is allowed too."""
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        values = self._checked(
            name,
            default,
            lambda value: isinstance(value, list) or (value is None and default is None),
            f"a list of whole numbers {bounds}",
        )
        # All at once: a body may have millions of them.
        if values and (
            set(map(type, values)) != {int} or min(values) < least or (most is not None and max(values) > most)
        ):
            wrong = next(value for value in values if not _is_integer(value, least, most))
            raise self._wrong(f"an item of {name}", wrong, f"a whole number {bounds}")
        return values

    def items(self, name: str, most: int) -> list[Any]:
        def is_right(value: Any) -> bool:
            return isinstance(value, list) and 0 < len(value) <= most

        return self._checked(name, ..., is_right, f"a list of 1 to {most} items")

    def fault(self, text: str) -> Refused:
        return fault(f"{self._where}{text}")

    def raw(self, name: str, default: Any = ...) -> Any:
        """The value as it came; the caller checks it."""
        return self._value(name, default)


def _is_integer(value: Any, least: int, most: int | None) -> bool:
    return type(value) is int and value >= least and (most is None or value <= most)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def printable(text: str) -> str:
    """A client's text without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class Limits:
    """What the model takes: tokens below `vocab_size`, at most `positions` of them; None where unknown."""

    def __init__(self, vocab_size: int | None, positions: int | None):
        self.vocab_size, self.positions = vocab_size, positions

    def tokens(self, fields: Fields, *, room: int) -> list[int]:
        """The field `tokens` of a request, not empty, with `room` for further tokens behind it."""
        tokens = fields.integers("tokens", 0, None if self.vocab_size is None else self.vocab_size - 1)
        if not tokens:
            raise fields.fault("tokens is empty")
        if self.positions is not None and len(tokens) + room > self.positions:
            new = f" and {room} new one" if room else ""
            raise fields.fault(f"{len(tokens)} tokens{new} are too many: the model has {self.positions} positions")
        return tokens

    def generation(self, body: dict[str, Any]) -> tuple[list[Request], Sampling]:
        """The requests and the sampling of a body of /generate. A completion ends at the model's last position."""
        fields = Fields(body, ("requests", "sampling", "version"))
        sampling = self._sampling(fields.raw("sampling"))
        requests = []
        for number, item in enumerate(fields.items("requests", REQUESTS)):
            each = Fields(item, ("tokens", "seed", "max_new_tokens"), f"request {number}")
            tokens = self.tokens(each, room=1)
            limit = each.integer("max_new_tokens", 1, self.positions, None)
            if self.positions is not None:
                limit = min(limit or sampling.max_new_tokens, self.positions - len(tokens))
            requests.append(Request(tokens, each.integer("seed", *SEEDS), limit))
        return requests, sampling

    def _sampling(self, item: Any) -> Sampling:
        default = Sampling()
        fields = Fields(item, tuple(Sampling.__dataclass_fields__), "sampling")
        ends = fields.integers("ends", 0, None, None)  # a tokenizer may have some that the model has not
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
