"""Translation of a config: flags with their sources, and every key that is noted, needless or refused."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ...templates.plural import plural
from ..flags import OptionValue, UsageError, show
from .keys import Keys, general
from .table import Row


@dataclass
class Translation:
    """Flags of a command that does what a config asks for."""

    dialect: str
    file: str
    command: str = "rlhf"  # pt, sft or rlhf
    flags: dict[str, OptionValue] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # by flag
    processes: int | None = None  # training processes on all nodes; None: the launcher says
    nodes: int = 1
    notes: list[str] = field(default_factory=list)  # "KEY VALUE: ..."
    needless: dict[str, str] = field(default_factory=dict)  # key -> reason
    refused: list[str] = field(default_factory=list)  # "KEY VALUE: problem. Fix"
    needed_flags: dict[str, str] = field(default_factory=dict)  # flag -> what is refused without it on the line

    def set(self, flag: str, value: OptionValue, source: str) -> None:
        """Set a flag. source: keys and arithmetic, such as "run.yaml: data.batch_size 16 x rollout.n 8".

        Two keys that set a flag to different values are refused.
        """
        if flag in self.flags and self.flags[flag] != value:
            self.refused.append(
                f"--{flag}: {source} asks for {show(value)}, but {self.sources[flag]} for {show(self.flags[flag])}. "
                "Remove one of them"
            )
            return
        self.flags[flag], self.sources[flag] = value, source

    def source(self, keys: Keys, key: str) -> str:
        """Return where a key is set, or that its default holds."""
        return keys.source(key) if key in keys else f"{self.dialect}'s default of {keys.full(key)}"

    def note(self, keys: Keys, key: str, text: str) -> None:
        """Say what becomes of a key that is not followed to the letter, and take it."""
        keys.take(key)
        self.notes.append(f"{keys.shown(key)}: {text}.")

    def ignore(self, keys: Keys, key: str, why: str) -> None:
        """Take a key that changes nothing here."""
        keys.take(key)
        self.needless[keys.full(key)] = why

    def refuse(self, keys: Keys, key: str, text: str) -> None:
        """Refuse a key, and take it. text: the problem and the fix, without the last full stop."""
        keys.take(key)
        self.refused.append(f"{keys.shown(key)}: {text}")


@dataclass(frozen=True)
class Default:
    """A system's default that differs from ours, which is written out."""

    value: OptionValue
    key: str  # key whose default it is


@dataclass(frozen=True)
class Dialect:
    """Config format of one system."""

    name: str
    rows: tuple[Row, ...]
    compute: Callable[[Keys, Translation], None]
    """Set the command, and every flag that is more than one key's value. Runs before the rows."""
    defaults: Mapping[str, Default] = field(default_factory=dict)  # by flag
    """Set last, where the command has the flag and no key has set it."""
    tree: str = ""
    """Table that has verl's tree; its rows are verl's."""


def translate(dialect: Dialect, keys: Keys) -> Translation:
    """Return the translation of a config. Refused keys are in its `refused`."""
    translation = Translation(dialect.name, keys.file)
    dialect.compute(keys, translation)
    rows = {row.key: row for row in dialect.rows}
    for key in keys.untaken():
        row = find_row(general(key), rows)
        if row is None:
            if keys.peek(key) is None and any(name.startswith(f"{general(key)}.") for name in rows):
                continue  # a table of null
            translation.refuse(keys, key, _unknown(general(key), rows))
        else:
            _apply(row, key, keys, translation)
    translation.refused += [text for text in dict.fromkeys(keys.problems) if text not in translation.refused]
    for flag, default in dialect.defaults.items():
        if flag not in translation.flags:
            translation.set(flag, default.value, f"{dialect.name}'s default of {default.key}")
    return translation


def take_computed(keys: Keys, rows: Iterable[Row]) -> None:
    """Take the keys that `Dialect.compute` would have taken, where the config's task itself is refused."""
    table = {row.key: row for row in rows}
    for key in keys.untaken():
        row = find_row(general(key), table)
        if row is not None and row.kind == "computed":
            keys.take(key)


def find_row(key: str, rows: dict[str, Row]) -> Row | None:
    """Return the row of a key: the one of that name, else the first whose `*` and `**` fit."""
    if key in rows:
        return rows[key]
    return next((row for row in rows.values() if "*" in row.key and _fits(key.split("."), row.key.split("."))), None)


def _fits(names: list[str], pattern: list[str]) -> bool:
    if pattern[-1:] == ["**"]:
        return len(names) >= len(pattern) and _fits(names[: len(pattern) - 1], pattern[:-1])
    return len(names) == len(pattern) and all(
        part in ("*", name) or (part == "*[]" and name.endswith("[]"))
        for name, part in zip(names, pattern, strict=True)
    )


def _apply(row: Row, key: str, keys: Keys, translation: Translation) -> None:
    """Take a key by its row."""
    value = keys.take(key)
    if row.kind == "needless":
        translation.needless[key] = row.text
    elif value is None:
        pass  # null: as if left out
    elif row.kind == "flag":
        _set(row, key, value, keys, translation)
    elif any(_equal(value, neutral) for neutral in row.accepted):
        translation.needless[key] = "as it is here" if row.kind == "only" else "asks for nothing"
    elif row.kind == "noted":
        translation.note(keys, key, row.text)
    elif row.kind == "only":
        allowed = " or ".join(show(item) or "none" for item in row.accepted)
        problem = f"only {allowed} is supported" if allowed else "is not supported"
        translation.refuse(keys, key, f"{problem}. {row.text}")
    elif row.kind == "computed":  # the dialect takes it in other configs
        translation.refuse(keys, key, f"has no effect in this config ({row.text}). Remove it")
    else:
        translation.refuse(keys, key, row.text)


def _set(row: Row, key: str, value: OptionValue, keys: Keys, translation: Translation) -> None:
    if row.values is not None:
        choices = {name.lower(): ours for name, ours in row.values.items()}
        if show(value).lower() not in choices:
            translation.refuse(keys, key, f"choose one of {', '.join(row.values)}")
            return
        value = choices[show(value).lower()]
    translation.set(row.flags[0], value, keys.source(key))


def _equal(value: OptionValue, other: OptionValue) -> bool:
    """Return whether two values are written alike, or are the same number or truth value."""
    if isinstance(value, bool) == isinstance(other, bool) and value == other:
        return True
    return show(value).lower() == show(other).lower()


def _unknown(key: str, rows: Iterable[str]) -> str:
    """Return the message for a key without a row, with the nearest one: of the same table, else of all."""
    rows = list(rows)
    parent, _, name = key.rpartition(".")
    siblings = {row.rpartition(".")[2] for row in rows if _fits(parent.split("."), row.rpartition(".")[0].split("."))}
    sibling = _nearest(name, siblings - {"*", "**", "*[]"})
    if sibling:
        return f"no such key. The nearest is {f'{parent}.{sibling}' if parent else sibling}"
    nearest = difflib.get_close_matches(key, [row for row in rows if "*" not in row], n=1, cutoff=0.6)
    return "no such key. " + (f"The nearest is {nearest[0]}" if nearest else "Remove it")


def _nearest(name: str, others: Iterable[str]) -> str | None:
    """Return the name with the fewest changed letters, up to a third of them and at least one, else a similar one."""
    others = sorted(others)
    distances = {other: _distance(name, other) for other in others if abs(len(name) - len(other)) <= len(name) // 3 + 1}
    closest = min(distances, key=distances.__getitem__, default="")
    if closest and distances[closest] <= max(1, len(name) // 3):
        return closest
    similar = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
    return similar[0] if similar else None


def _distance(one: str, other: str) -> int:
    """Return the number of letters to change, add or remove (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        previous, row = row, [i]
        for j, target in enumerate(other, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (letter != target)))
    return row[-1]


def check(translation: Translation) -> None:
    """Raise UsageError with every refused key."""
    if translation.refused:
        count = len(translation.refused)
        lines = "\n".join(f"  {text}." for text in translation.refused)
        raise UsageError(
            f"{translation.file}: {plural(count, 'key')} of this {translation.dialect} config cannot be followed:\n"
            f"{lines}\nOn the command line, ~KEY takes a key away and KEY=VALUE sets it."
        )
