"""Config of another system, read by OmegaConf: its leaves by dotted key, and which of them were taken."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, overload

from ..flags import OptionValue, UsageError, show
from .hydra_defaults import with_defaults

type Tree = dict[str, Any]

OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=\s+~-][^=\s]*?)(?:=(?P<value>.*))?", re.DOTALL)
LONGEST_VALUE = 100  # in a message
INDEX = re.compile(r"\[\d+\]")


def read_tree(path: str | None, overrides: list[str]) -> tuple[Tree, list[str]]:
    """Return a config with the overrides of the command line and without `${...}`, and the problems of its values.

    path: a YAML or JSON file; None: the overrides alone
    overrides: `key=value`, `+key=value`, `++key=value` or `~key`, as Hydra takes them
    Raises UsageError for a file or an override that cannot be read.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    config = OmegaConf.create()
    if path is not None:
        file = Path(path).expanduser()
        if not file.is_file():
            raise UsageError(f"{path}: no such file. Fix the path.")
        try:
            config = OmegaConf.load(file)
            if OmegaConf.is_dict(config):
                config = with_defaults(config, file.parent)
        except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from None
        if not OmegaConf.is_dict(config):
            raise UsageError(f"{path}: not a table of key: value. Fix it.")
    for word in overrides:
        match = OVERRIDE.fullmatch(word)
        if not match or (match["sign"] == "~") == (match["value"] is not None):
            raise UsageError(f"{word}: not an override. Write key=value, or ~key to take a key away.")
        try:
            if match["sign"] == "~":
                _delete(config, match["key"])
            else:
                config = OmegaConf.merge(config, OmegaConf.from_dotlist([f"{match['key']}={match['value']}"]))
        except (YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
            raise UsageError(f"{word}: cannot be read: {str(error).splitlines()[0]}") from None
    problems: list[str] = []
    return _resolve(config, "", problems), problems


def _delete(config: Any, key: str) -> None:
    from omegaconf import OmegaConf

    parent, _, name = key.rpartition(".")
    table = OmegaConf.select(config, parent) if parent else config
    if not OmegaConf.is_dict(table) or name not in table:
        raise UsageError(f"~{key}: the config has no such key. Fix it, or remove the word.")
    del table[name]


def _resolve(node: Any, key: str, problems: list[str]) -> Any:
    """Return a config node as plain values. A `${...}` that leads nowhere is a problem, and left out."""
    from omegaconf import MissingMandatoryValue, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not OmegaConf.is_config(node):
        return node
    names = range(len(node)) if OmegaConf.is_list(node) else list(node)
    values: dict[Any, Any] = {}
    for name in names:
        child = f"{key}[{name}]" if OmegaConf.is_list(node) else f"{key}.{name}" if key else str(name)
        try:
            values[name] = _resolve(node[name], child, problems)
        except MissingMandatoryValue:
            problems.append(f"{child} ???: has no value. Set it: {child}=VALUE")
        except OmegaConfBaseException:
            written = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index]
            problems.append(f"{child} {written}: leads to no value. Set it: {child}=VALUE")
    return list(values.values()) if OmegaConf.is_list(node) else {str(name): value for name, value in values.items()}


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, OptionValue]]:
    """Yield each leaf of a config with its dotted key. A list of tables has a leaf for each value of each table."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        for index, item in enumerate(tree):
            yield from leaves(item, f"{key}[{index}]")
    else:
        yield key, tree


def general(key: str) -> str:
    """Return a key as rows write it: `a.tasks[1].b` -> `a.tasks[].b`."""
    return INDEX.sub("[]", key)


class Keys:
    """Leaves of a config by dotted key. Remembers which were taken, and values of a wrong type."""

    def __init__(self, tree: Tree, file: str, overridden: frozenset[str] = frozenset()) -> None:
        self.tree = tree
        self.file = file  # as the user wrote it; "command line" without a file
        self.problems: list[str] = []
        self._overridden = overridden
        self._leaves = dict(leaves(tree))
        self._taken: set[str] = set()
        self._origins: dict[str, str] = {}  # derived key -> key that it comes from
        self._files: dict[str, str] = {}  # keys of other files
        self._prefix = ""

    def view(self, prefix: str) -> "Keys":
        """Return the keys of a table, without its name. A key taken there is taken here."""
        view = copy(self)
        view._prefix = f"{self._prefix}{prefix}."
        return view

    def full(self, key: str) -> str:
        """Return a key of a view as the config has it."""
        return self._prefix + key

    def derive(self, key: str, value: OptionValue, origin: str, *, replaces: bool = False) -> None:
        """Give a key of a view a value that a key of the whole config implies, unless it has one of its own.

        replaces: a value of its own is replaced
        """
        key = self.full(key)
        self._taken.add(origin)
        if replaces or self._leaves.get(key) is None:
            self._leaves[key] = value
            if key != origin:
                self._origins[key] = origin

    def add_file(self, tree: Tree, file: str) -> None:
        """Add the keys of another file to those of a view, which go before."""
        for name, value in leaves(tree):
            key = self.full(name)
            if key not in self._leaves:
                self._leaves[key], self._files[key] = value, file

    def is_overridden(self, key: str) -> bool:
        """Return whether the command line sets a key."""
        return self.full(key) in self._overridden

    def __contains__(self, key: str) -> bool:
        """Return whether a key has a value other than null."""
        return self._leaves.get(self.full(key)) is not None

    def source(self, key: str) -> str:
        """Return where a key is set, for messages and args.json."""
        key = self._origins.get(self.full(key), self.full(key))
        file = "command line" if key in self._overridden else self._files.get(key, self.file)
        return f"{file}: {key}"

    def shown(self, key: str) -> str:
        """Return a key with its value, as the beginning of a message."""
        key = self._origins.get(self.full(key), self.full(key))
        value = " ".join(show(self._leaves.get(key)).split())
        return f"{key} {value if len(value) <= LONGEST_VALUE else f'{value[:LONGEST_VALUE]}...'}".rstrip()

    def under(self, prefix: str) -> list[str]:
        """Return the keys of a table, or of the tables of a list."""
        start, full = len(self._prefix), self.full(prefix)
        end = len(full)
        return [key[start:] for key in self._leaves if key.startswith(full) and (len(key) == end or key[end] in ".[")]

    def names(self, prefix: str) -> list[str]:
        """Return the names that a table has, or the indexed names of a list of tables: `a.tasks[0]`."""
        depth = len(prefix) + 1
        if any(key.startswith(f"{prefix}[") for key in self._keys()):
            return list(dict.fromkeys(f"{prefix}{INDEX.match(key, depth - 1)[0]}" for key in self.under(prefix)))  # type: ignore[index]
        return list(
            dict.fromkeys(re.split(r"[.\[]", key[depth:])[0] for key in self._keys() if key.startswith(f"{prefix}."))
        )

    def untaken(self) -> list[str]:
        return [key for key in self._keys() if self.full(key) not in self._taken]

    def peek(self, key: str) -> Any:
        """Return a value without taking it; None where the key is not set."""
        return self._leaves.get(self.full(key))

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default where the key is not set or null."""
        self._taken.add(self.full(key))
        value = self.peek(key)
        return default if value is None else value

    def drop(self, prefix: str) -> None:
        """Take all keys of a table."""
        self._taken.update(map(self.full, self.under(prefix)))

    def _keys(self) -> list[str]:
        return [key[len(self._prefix) :] for key in self._leaves if key.startswith(self._prefix)]

    @overload
    def integer(self, key: str, default: int) -> int: ...
    @overload
    def integer(self, key: str, default: None = None) -> int | None: ...
    def integer(self, key: str, default: int | None = None) -> int | None:
        """Take a whole number. A value of another type is a problem, and the default is returned."""
        value = self.take(key, default)
        if isinstance(value, str | float) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):  # 1e3 is a whole number too
                number = float(value)
                value = int(number) if number == int(number) else value
        return self._typed(key, value, default, int, "a whole number is needed")

    @overload
    def number(self, key: str, default: float) -> float: ...
    @overload
    def number(self, key: str, default: None = None) -> float | None: ...
    def number(self, key: str, default: float | None = None) -> float | None:
        """Take a number. A value of another type is a problem, and the default is returned."""
        value = self.take(key, default)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)
        return self._typed(key, value, default, (int, float), "a number is needed")

    @overload
    def boolean(self, key: str, default: bool) -> bool: ...
    @overload
    def boolean(self, key: str, default: None = None) -> bool | None: ...
    def boolean(self, key: str, default: bool | None = None) -> bool | None:
        """Take true or false. A value of another type is a problem, and the default is returned."""
        value = self.take(key, default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        return self._typed(key, value, default, bool, "true or false is needed")

    @overload
    def text(self, key: str, default: str) -> str: ...
    @overload
    def text(self, key: str, default: None = None) -> str | None: ...
    def text(self, key: str, default: str | None = None) -> str | None:
        """Take a text. A value of another type is a problem, and the default is returned."""
        return self._typed(key, self.take(key, default), default, str, "text is needed")

    def items(self, key: str) -> list[Any]:
        """Take a list, or a single value as a list of one."""
        value = self.take(key, [])
        return value if isinstance(value, list) else [value]

    def _typed(self, key: str, value: Any, default: Any, kind: Any, needed: str) -> Any:
        is_number_but_bool = kind is not bool and isinstance(value, bool)
        if value is None or (isinstance(value, kind) and not is_number_but_bool):
            return value
        self.problems.append(f"{self.shown(key)}: {needed}")
        return default
