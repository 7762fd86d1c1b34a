"""What the user typed, or wrote into a config file, in one spelling: today's names, each with a list of raw values.

The dialect: lists take spaces (`--dataset a b`), booleans take true, false or nothing, tables take JSON, `--a-b` is
`--a_b`, a first word that ends in .yaml, .yml or .json is a config file, as is `--config FILE`.
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..tasks.run.args_json import load_args
from .flags import Flag, UsageError, convert, flags_of, nearest, show
from .foreign_flags import FOREIGN_FLAGS
from .legacy_flags import ALWAYS, LATER, LATER_VALUES, NEEDLESS, today, written

FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
CONFIG_FILE = (".yaml", ".yml", ".json")


@dataclass
class Given:
    """Flags given at one place, by today's names: raw values, where they come from, and what to tell the user."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def from_argv(argv: list[str], flags: dict[str, Flag], others: dict[str, str]) -> tuple[Given, str | None]:
    """The flags of a command line (without program and command), and the path of its config file.

    `others` names flags that are not among `flags`, each with what to say of it. Raises UsageError for what no flag
    takes, and for a list that is given twice: of a single value the last one counts.
    """
    pairs, config = _split(argv)
    given = Given()
    for name, values in pairs:
        now = today(name, values)[0]
        if now in given.values and flags[now].is_list:
            both = show([*given.values[now], *values])
            raise UsageError(f"--{now} is given twice. Lists take spaces: --{now} {both}")
        _take(given, name, values, flags, others, "command line")
    return given, config


def from_config(path: str, flags: dict[str, Flag], others: dict[str, str]) -> Given:
    """The flags of a YAML or JSON file, or of an args.json. Variables of its `ENV:` block that are unset are set."""
    table = _table(path)
    variables = table.pop("ENV", None) or {}
    if not isinstance(variables, dict):
        raise UsageError(f"ENV: {show(variables)}: a table of variable: value is needed (from {path}).")
    for name, value in variables.items():
        try:
            os.environ.setdefault(str(name), show(value))
        except (OSError, ValueError):  # an empty name, one with "=", a NUL
            raise UsageError(f"ENV: {show({name: value})}: not a variable and its value (from {path}).") from None
    given = Given()
    for name, (value, source) in _entries(table, path).items():
        _take(given, name, value if isinstance(value, list) else [value], flags, others, source)
    return given


def value_of(name: str, argv: list[str]) -> str | None:
    """What one flag is, on a command line (without program and command) or else in its config file; None: left out.

    Raises UsageError where this version does not have that value.
    """
    pairs, config = _split(argv)
    given = [(show(values), "") for other, values in pairs if other == name]
    if not given and config:
        given = [
            (show(value), f" (from {source})")
            for other, (value, source) in _entries(_table(config), config).items()
            if other == name and value is not None
        ]
    if not given:
        return None
    value, where = given[-1]
    if later := LATER_VALUES.get((name, value)):
        raise UsageError(f"--{name} {value}{where}: this version does not have {later.feature}. {later.cure}")
    return value


def _split(argv: list[str]) -> tuple[list[tuple[str, list[str]]], str | None]:
    """Each flag of a command line with its words, and the path of the config file."""
    argv, config = list(argv), None
    if argv and argv[0].endswith(CONFIG_FILE) and not argv[0].startswith("-"):
        config = argv.pop(0)
    pairs: list[tuple[str, list[str]]] = []
    for word in argv:
        if FLAG.fullmatch(word):
            name, equals, value = word[2:].partition("=")
            pairs.append((name.replace("-", "_"), [value] if equals else []))
        elif pairs:
            pairs[-1][1].append(word)
        else:
            raise UsageError(
                f"{word}: not a flag. Flags begin with --, a config file ends in {', '.join(CONFIG_FILE)}."
            )
    for name, values in pairs:
        if name == "config":
            if len(values) != 1:
                raise UsageError("--config takes one file.")
            config = values[0]
    return [(name, values) for name, values in pairs if name != "config"], config


def _table(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"--config {path}: no such file.")
    try:
        table = _read(file)
    except ValueError as error:  # json's and yaml's errors say the line
        raise UsageError(f"--config {path}: cannot be read: {error}") from None
    except RecursionError:
        raise UsageError(f"--config {path}: cannot be read: it is nested too deeply.") from None
    if not isinstance(table, dict):
        raise UsageError(f"--config {path}: a table of flag: value is needed.")
    for name in table:
        if not isinstance(name, str):
            raise UsageError(f"--config {path}: {show(name)} is not the name of a flag. Fix it, or put it in quotes.")
    return table


def _entries(table: dict[str, Any], path: str) -> dict[str, tuple[Any, str]]:
    """Value and source of each flag in a config file's table."""
    saved = isinstance(table.get("options"), dict)
    entries = load_args(table, path) if saved else {name: (value, path) for name, value in table.items()}
    return {name.replace("-", "_"): entry for name, entry in entries.items()}


def _read(file: Path) -> Any:
    if file.suffix == ".json":
        return json.loads(file.read_text())
    import yaml

    try:
        with file.open() as stream:
            tree = yaml.compose(stream, yaml.SafeLoader)
        if isinstance(tree, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, _ in tree.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines:
                    raise ValueError(f"{name} is in line {lines[name]} and again in line {line}. Remove one")
                lines[name] = line
        return yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _take(
    given: Given, name: str, values: list[Any], flags: dict[str, Flag], others: dict[str, str], source: str
) -> None:
    """Put one flag, as it was written at `source`, into `given`."""
    asked, where = written(name, values), "" if source == "command line" else f" (from {source})"
    name, values, warning = today(name, values)
    if warning:
        given.notes.append(f"{warning}; the older one still works.")
    if later := LATER_VALUES.get((name, show(values))):
        raise UsageError(f"{asked}{where}: this version does not have {later.feature}. {later.cure}")
    elif name in flags:
        if values or flags[name].is_bool or (flags[name].is_list and where):
            given.values[name] = _one_or_all(flags[name], values or ["true"] * flags[name].is_bool, where)
            given.sources[name] = source
        elif not warning:  # an older spelling can ask for nothing
            raise UsageError(f"{asked} needs a value{where}: {flags[name].metavar}.")
    elif name in ALWAYS:
        if show(values).lower() not in ("", "true"):
            given.notes.append(f"{asked} is not followed: {ALWAYS[name]}.")
    elif name in NEEDLESS:
        given.notes.append(f"{asked} is not needed: {NEEDLESS[name]}.")
    elif name in LATER:
        later, text = LATER[name], show(values).lower()
        asks_for_nothing = text in later.neutral or (text == "" and ("true" in later.neutral or values == [None]))
        if not asks_for_nothing:
            raise UsageError(f"{asked}{where}: this version does not have {later.feature}. {later.cure}")
    else:
        raise UsageError(_unknown(name, flags, others) + where)


def _one_or_all(flag: Flag, values: list[Any], where: str) -> Any:
    if flag.is_list:
        return [value for value in values if value is not None]
    if len(values) > 1:
        raise UsageError(f"{written(flag.name, values)}: takes one value{where}.")
    return values[0]


def _unknown(name: str, flags: dict[str, Flag], others: dict[str, str]) -> str:
    elsewhere = FOREIGN_FLAGS.get(name)
    if elsewhere and (elsewhere.flag in flags or not elsewhere.flag):
        hint = f"The nearest is --{elsewhere.flag}." if elsewhere.flag else ""
        return " ".join(filter(None, (f"--{name}: no such flag.", hint, elsewhere.note)))
    if name in others:
        return f"--{name} is {others[name]}"
    close = nearest(name, flags)
    return f"--{name}: no such flag. " + (f"The nearest is --{close}." if close else "--help lists all flags.")


def resolve(options: type, typed: dict[str, Any], filed: Given | None) -> tuple[Any, dict[str, str]]:
    """An instance of an option class, and where each value came from. The command line wins over the config file."""
    flags = flags_of(options)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(flags, "default")
    for given in ([filed] if filed else []) + [Given(typed, dict.fromkeys(typed, "command line"))]:
        for name, value in given.values.items():
            values[name] = convert(flags[name], value, given.sources[name])
            if given.sources[name] != "default" or values[name] != flags[name].default:
                sources[name] = given.sources[name]
    resolved = options(**values)
    for name, flag in flags.items():
        if getattr(resolved, name) != values.get(name, flag.default):  # the class filled it in
            sources[name] = "derived"
    return resolved, sources
