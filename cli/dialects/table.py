"""Rows of a dialect's table: what becomes of each key of another system's config.

A row's key is dotted. `*` stands for one name that users choose, `**` for the rest of the key, `[]` for each table of
a list. `Dialect.compute` runs before the rows, so that it may take keys for which a row would not be enough; each of
these has a `computed` row, for the documentation and for hints.

A key that changes a formula, a batch or a schedule is honoured or refused; only placement may be `noted`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..flags import OptionValue


@dataclass(frozen=True)
class Row:
    """One key and its meaning here."""

    key: str
    kind: Literal["flag", "computed", "needless", "noted", "only", "refused"]
    flags: tuple[str, ...] = ()
    values: Mapping[str, OptionValue] | None = None  # flag: value there, as text -> value here
    accepted: tuple[OptionValue, ...] = ()  # only, noted, refused: values that ask for nothing
    text: str = ""  # reason, formula, or fix; a sentence without a full stop


def same(key: str, flag: str, text: str = "") -> Row:
    """Return the row of a key with the meaning and the values of a flag."""
    return Row(key, "flag", (flag,), text=text)


def valued(key: str, flag: str, values: Mapping[str, OptionValue], text: str = "") -> Row:
    """Return the row of a key with the meaning of a flag and other values. Values without an entry are refused."""
    return Row(key, "flag", (flag,), values, text=text)


def computed(key: str, *flags: str, text: str) -> Row:
    """Return the row of a key that `Dialect.compute` takes. text: the formula."""
    return Row(key, "computed", flags, text=text)


def needless(key: str, why: str) -> Row:
    """Return the row of a key that has no counterpart and changes nothing."""
    return Row(key, "needless", text=why)


def noted(key: str, why: str, *neutral: OptionValue) -> Row:
    """Return the row of a key of placement that is not followed, with the same numbers. why: is printed as a note.

    neutral: values that need no note
    """
    return Row(key, "noted", accepted=neutral, text=why)


def only(key: str, *values: OptionValue, fix: str) -> Row:
    """Return the row of a key that is accepted with the values that describe what happens here anyway."""
    return Row(key, "only", accepted=values, text=fix)


def refused(key: str, fix: str, *neutral: OptionValue) -> Row:
    """Return the row of an unsupported feature. fix: what is not supported, and what to do. null is neutral."""
    return Row(key, "refused", accepted=neutral, text=fix)


def under(prefix: str, rows: Iterable[Row]) -> list[Row]:
    """Return rows with a longer key: those of a table that several parents have."""
    return [replace(row, key=f"{prefix}.{row.key}") for row in rows]
