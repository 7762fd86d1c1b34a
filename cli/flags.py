"""Flags derived from the fields of option classes, for command line, config files, help and docs/flags.md."""

import dataclasses
import difflib
import functools
import inspect
import json
import math
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..templates.json_types import JsonObject

# Largest magnitudes: torch and megatron-core hold some integers in 32 bits, and numbers in fp32.
LARGEST = {int: 2**31 - 1, float: 3.4e38}


type Scalar = bool | int | float | str
type OptionValue = Scalar | list[Scalar] | JsonObject | None  # value of a flag, raw or converted


class UsageError(Exception):
    """Invalid options. The message has the flag, its value and the fix. The command exits with code 2."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Convert errors of checks in other packages to UsageError."""
    try:
        yield
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise UsageError(str(error)) from None


@dataclass(frozen=True)
class Flag:
    """One field of an option class."""

    name: str
    type: Any  # annotation, without Annotated and without `| None`
    default: OptionValue
    help: str
    group: str
    bounds: str = ""  # interval of a number: "[0, 1)"
    words: tuple[str, ...] = ()  # words for a number that the command line finds before anything reads it

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is list

    @property
    def is_bool(self) -> bool:
        return self.type is bool

    @property
    def metavar(self) -> str:
        """Type as shown in help: `int`, `true|false`, `a|b`, `text ...`, `JSON`."""
        return "|".join((_metavar(self.type), *self.words))

    @property
    def choices(self) -> list[str]:
        """Words that a value may be, for completion."""
        names = _metavar(self.type).removesuffix(" ...").split("|")
        return [*(names if len(names) > 1 else []), *self.words]

    @property
    def shown_default(self) -> str:
        return show(self.default)


def flags_of(options: type) -> dict[str, Flag]:
    """Return the flags of an option class by name, group by group."""
    return {flag.name: flag for flag in _flags(options)}


@functools.cache
def _flags(options: type) -> tuple[Flag, ...]:
    """Return the flags of a class and its bases in method resolution order, then those of their groups."""
    kinds = get_type_hints(options)
    defaults: dict[str, Any] = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in dataclasses.fields(options)
    }
    owner: dict[str, type] = {}  # class that defines a field; subclasses may change its default
    for base in reversed(options.__mro__):
        owner |= {name: base for name in _fields_of(base) if name not in owner}
    direct: list[Flag] = []
    grouped: list[Flag] = []
    for base in options.__mro__:
        for name, annotated in _fields_of(base).items():
            if owner[name] is not base:
                continue
            if dataclasses.is_dataclass(kinds[name]):
                grouped += (replace(flag, default=getattr(defaults[name], flag.name)) for flag in _flags(kinds[name]))
            else:
                text, *more = annotated.__metadata__
                bounds, words = more[0] if more else "", tuple(more[1:])
                kind = _without_none(kinds[name])
                direct.append(Flag(name, kind, defaults[name], text, _title(base), bounds, words))
    return (*direct, *grouped)


def _title(group: type) -> str:
    return (group.__doc__ or "").split("\n")[0]


def _fields_of(group: type) -> dict[str, Any]:
    """Return the fields that a class itself defines, with their annotations."""
    names = {field.name for field in dataclasses.fields(group)} if dataclasses.is_dataclass(group) else ()
    return {name: annotated for name, annotated in inspect.get_annotations(group).items() if name in names}


def _without_none(annotation: Any) -> Any:
    """Return an annotation without None: `int | None` -> `int`."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (member for member in get_args(annotation) if member is not type(None))
    return annotation


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list:
        return f"{_metavar(get_args(kind)[0])} ..."
    if get_origin(kind) is dict:
        return "JSON"
    return {bool: "true|false", str: "text", int: "int", float: "number"}[kind]


def show(value: object) -> str:
    """Return a value as written on the command line; "" for None."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(show, value))
    if isinstance(value, dict):
        return json.dumps(value) if value else ""
    return "" if value is None else str(value)


def convert(flag: Flag, value: OptionValue, source: str) -> OptionValue:
    """Convert a raw value from the command line (text) or a config file (text, number, list, table).

    Raises UsageError with the expected type, and the source if that is a file.
    """
    origin = "" if source == "command line" else f" (from {source})"
    if value is None:
        if flag.default is None:
            return None
        raise UsageError(f"--{flag.name}: no value{origin}. Set {flag.metavar}.")
    if flag.is_list:
        items = value if isinstance(value, list) else [value]
        return [_convert(flag, get_args(flag.type)[0], item, origin) for item in items]
    if isinstance(value, str) and value in flag.words:
        return value
    return _convert(flag, flag.type, value, origin)


def _convert(flag: Flag, kind: Any, value: Any, origin: str) -> Any:
    def value_error(problem: str) -> UsageError:
        return UsageError(f"--{flag.name} {show(value)}: {problem}{origin}.")

    if get_origin(kind) is Literal:
        text = show(value)
        if text not in get_args(kind):
            raise value_error(f"choose one of {', '.join(get_args(kind))}")
        return text
    if get_origin(kind) is dict:
        try:
            table = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise value_error(f"not valid JSON: {error}") from None
        except RecursionError:
            raise value_error("JSON that is nested too deeply") from None
        if not isinstance(table, dict):
            raise value_error('a JSON object is needed, as in \'{"old": "new"}\'')
        if get_args(kind)[1] is str and not all(isinstance(entry, str) for entry in table.values()):
            raise value_error('each value must be text, as in \'{"old": "new"}\'')
        return table
    if isinstance(value, list | dict):
        raise value_error("one value is needed")
    if kind is bool:
        text = show(value).lower()
        if text not in ("true", "false", "1", "0", "yes", "no"):
            raise value_error("true or false is needed")
        return text in ("true", "1", "yes")
    if kind is str:
        if isinstance(value, bool):  # YAML's words yes, no, on and off too
            raise value_error("text is needed: put it in quotes")
        return show(value)
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)  # 1e3 is an int too
        if not math.isfinite(number):
            raise ValueError
        if kind is int:
            number = int(value) if isinstance(value, int) or str(value).strip().lstrip("+-").isdigit() else number
            if number != int(number):
                raise value_error("a whole number is needed")
            number = int(number)
    except (ValueError, OverflowError):
        raise value_error("a whole number is needed" if kind is int else "a number is needed") from None
    if problem := violated_bound(number, flag.bounds, LARGEST[kind]):
        raise UsageError(f"--{flag.name} {number}: {problem}{origin}.")
    return number


def violated_bound(number: float, bounds: str, largest: float) -> str | None:
    """Return the condition that a number violates, or None: `bounds`, or an absolute value of at most `largest`.

    bounds: interval such as "[0, 1)"; "": unbounded
    """
    low, high = (float(part) for part in bounds[1:-1].split(",")) if bounds else (-math.inf, math.inf)
    excludes_low, excludes_high = bounds.startswith("("), bounds.endswith(")")
    if abs(number) > largest and math.isinf(high if number > 0 else low):
        return f"must be at most {_plain_number(largest)} in size"
    if (number > low or (number == low and not excludes_low)) and (
        number < high or (number == high and not excludes_high)
    ):
        return None
    is_wide = high - low > 1e5  # the message names only the violated bound
    lower = "" if is_wide and number > low else f"{'above' if excludes_low else 'at least'} {_plain_number(low)}"
    upper = "" if is_wide and number <= low else f"{'below' if excludes_high else 'at most'} {_plain_number(high)}"
    return f"must be {' and '.join(filter(None, (lower, upper)))}"


def _plain_number(value: float) -> str:
    return str(int(value)) if abs(value) < 1e10 and value == int(value) else f"{value:g}"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `name`, or None."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return matches[0] if matches else None
