"""Parsing of command lines and config files to canonical names with raw values.

Syntax: lists take spaces (`--dataset a b`), booleans take true, false or nothing, tables take JSON, `--a-b` is
`--a_b`, a first word that ends in .yaml, .yml or .json is a config file, as is `--config FILE`.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ..bridge.option_groups import compose, flag_values
from ..tasks.run.args_json import load_args
from ..templates.json_types import Json, JsonObject
from .accepted_flags import ALWAYS_TRUE, COMPARED, NO_EFFECT
from .flags import Flag, OptionValue, UsageError, convert, flags_of, nearest, show
from .foreign_flags import FOREIGN_FLAGS
from .legacy_flags import canonical, flag_text, invalid_value
from .unsupported_flags import UNSUPPORTED, UNSUPPORTED_VALUES

FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)
CONFIG_FILE = (".yaml", ".yml", ".json")
IGNORE_UNKNOWN = "ignore_args_error"  # flag that turns unknown flags into notes


@dataclass
class ParsedFlags:
    """Flags of one source by canonical name: raw values, their sources, and notes for the user."""

    values: dict[str, OptionValue] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    claims: dict[str, str] = field(default_factory=dict)  # flags of COMPARED with their values
    spellings: dict[str, str] = field(default_factory=dict)  # older spellings of flags, as they were written
    ignores_unknown: bool = False  # unknown flags become notes


def from_argv(
    argv: list[str], flags: dict[str, Flag], hints: dict[str, str], *, ignores_unknown: bool = False
) -> tuple[ParsedFlags, str | None]:
    """Return the flags of a command line (without program and command), and the path of its config file.

    hints: flags of other commands, each with the rest of its error message
    A repeated flag of a single value overrides the earlier one.
    Raises UsageError for unknown flags and repeated lists.
    """
    pairs, config = split_words(argv)
    for name, values in pairs:  # before flags that belong to an unsupported value
        _check_supported(*canonical(name, values)[:2], flag_text(name, values))
    parsed = ParsedFlags(ignores_unknown=ignores_unknown)
    for name, values in pairs:
        new = canonical(name, values)[0]
        if new in parsed.values and flags[new].is_list:
            joined = f"{show(parsed.values[new])} {show(values)}".strip()
            raise UsageError(f"--{new}: is set twice. Lists take spaces: --{new} {joined}")
        _add(parsed, name, values, flags, hints, "command line")
    return parsed, config


def from_config(
    path: str, flags: dict[str, Flag], hints: dict[str, str], *, ignores_unknown: bool = False
) -> ParsedFlags:
    """Return the flags of a YAML or JSON file or an args.json. Sets the unset variables of its `ENV:` block."""
    table = _table(path)
    variables = table.pop("ENV", None) or {}
    if not isinstance(variables, dict):
        raise UsageError(f"ENV: {show(variables)}: not a table of variable: value (from {path}). Fix it.")
    for name, value in variables.items():
        try:
            os.environ.setdefault(str(name), show(value))
        except (OSError, ValueError):  # an empty name, or one with "=" or NUL
            raise UsageError(
                f"ENV: {show({name: value})}: not a variable and its value (from {path}). Fix it."
            ) from None
    parsed = ParsedFlags(ignores_unknown=ignores_unknown)
    for name, (value, source) in _entries(table, path).items():
        _add(parsed, name, value if isinstance(value, list) else [value], flags, hints, source)
    return parsed


def ignores_unknown(argv: list[str]) -> bool:
    """Return whether a command line (without program and command) or its config file ignores unknown flags."""
    value = value_of(IGNORE_UNKNOWN, argv)
    if value is not None and value.lower() not in ("", "true", "false"):
        raise UsageError(f"--{IGNORE_UNKNOWN} {value}: true or false is needed.")
    return value is not None and value.lower() != "false"


def value_of(name: str, argv: list[str]) -> str | None:
    """Return the value of one flag on a command line (without program and command) or in its config file, or None.

    Raises UsageError for a value that is not supported.
    """
    pairs, config = split_words(argv)
    values_of = [(show(values), "") for other, values in pairs if other == name]
    if not values_of and config:
        values_of = [
            (show(value), f" (from {source})")
            for other, (value, source) in _entries(_table(config), config).items()
            if other == name and value is not None
        ]
    if not values_of:
        return None
    value, origin = values_of[-1]
    _check_supported(name, value, f"--{name} {value}{origin}")
    return value


def _check_supported(name: str, value: object, written: str) -> None:
    """Raise UsageError, which begins with the flag as it is written, for an unsupported value of a flag."""
    if unsupported := UNSUPPORTED_VALUES.get((name, show(value))):
        raise UsageError(f"{written}: no support for {unsupported.feature}. {unsupported.fix}")


def split_words(argv: list[str]) -> tuple[list[tuple[str, list[str]]], str | None]:
    """Return each flag of a command line with its words, and the path of the config file."""
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
                f"{word}: not a flag. Begin flags with --, and end a config file in {', '.join(CONFIG_FILE)}."
            )
    for name, values in pairs:
        if name == "config":
            if len(values) != 1:
                raise UsageError("--config: takes one file. Set one.")
            config = values[0]
    return [(name, values) for name, values in pairs if name != "config"], config


def _table(path: str) -> JsonObject:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"--config {path}: no such file. Fix the path.")
    try:
        table = _read(file)
    except ValueError as error:  # json's and yaml's errors have the line number
        raise UsageError(f"--config {path}: cannot be read: {error}") from None
    except RecursionError:
        raise UsageError(f"--config {path}: cannot be read: it is nested too deeply.") from None
    if not isinstance(table, dict):
        raise UsageError(f"--config {path}: not a table of flag: value. Fix it.")
    for name in table:
        if not isinstance(name, str):
            raise UsageError(f"--config {path}: {show(name)} is not the name of a flag. Fix it, or put it in quotes.")
    return table


def _entries(table: JsonObject, path: str) -> dict[str, tuple[Json, str]]:
    """Return the value and the source of each flag in a config file."""
    saved = isinstance(table.get("options"), dict)
    entries = load_args(table, path) if saved else {name: (value, path) for name, value in table.items()}
    return {name.replace("-", "_"): entry for name, entry in entries.items()}


def _read(file: Path) -> Json:
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


def _add(
    parsed: ParsedFlags, name: str, values: list, flags: dict[str, Flag], hints: dict[str, str], source: str
) -> None:
    """Add one flag, as written in `source`, to `parsed`."""
    original, origin = flag_text(name, values), "" if source == "command line" else f" (from {source})"
    if problem := invalid_value(name, values):
        raise UsageError(f"{original}: {problem}{origin}.")
    name, values, warning = canonical(name, values)
    if warning and name in flags:
        parsed.notes.append(warning)
        parsed.spellings[name] = original
    _check_supported(name, values, original + origin)
    if name in flags:
        if values or flags[name].is_bool or (flags[name].is_list and origin):
            parsed.values[name] = _one_or_all(flags[name], values or ["true"] * flags[name].is_bool, origin)
            parsed.sources[name] = source
        elif not warning:  # an older spelling may have no effect
            raise UsageError(f"{original}: no value{origin}. Set {flags[name].metavar}.")
    elif name in COMPARED:
        if values != [None]:
            parsed.claims[name] = show(values)
    elif name in ALWAYS_TRUE:
        if show(values).lower() not in ("", "true"):
            parsed.notes.append(f"{original} has no effect: {ALWAYS_TRUE[name]}.")
    elif name in NO_EFFECT:
        parsed.notes.append(f"{original} has no effect: {NO_EFFECT[name]}.")
    elif name in UNSUPPORTED:
        unsupported, text = UNSUPPORTED[name], show(values).lower()
        has_no_effect = unsupported.accepts(text) or (
            text == "" and ("true" in unsupported.neutral or values == [None])
        )
        if not has_no_effect:
            raise UsageError(f"{original}{origin}: no support for {unsupported.feature}. {unsupported.fix}")
    elif parsed.ignores_unknown and name != IGNORE_UNKNOWN:
        parsed.notes.append(f"{_unknown(name, flags, hints)}{origin} It is ignored (--{IGNORE_UNKNOWN} true).")
    elif name != IGNORE_UNKNOWN:
        raise UsageError(_unknown(name, flags, hints) + origin)


def _one_or_all(flag: Flag, values: list, origin: str) -> OptionValue:
    if flag.is_list:
        return [value for value in values if value is not None]
    if len(values) > 1:
        raise UsageError(f"{flag_text(flag.name, values)}: takes one value{origin}. Set one.")
    return values[0]


def _unknown(name: str, flags: dict[str, Flag], hints: dict[str, str]) -> str:
    foreign = FOREIGN_FLAGS.get(name)
    if foreign and (foreign.flag in flags or not foreign.flag):
        hint = f"The nearest is --{foreign.flag}." if foreign.flag else ""
        return " ".join(filter(None, (f"--{name}: no such flag.", hint, foreign.note)))
    if name in hints:
        return f"--{name}: {hints[name]}"
    close = nearest(name, flags)
    return f"--{name}: no such flag. " + (f"The nearest is --{close}." if close else "--help lists all flags.")


def resolve[T](
    options: type[T],
    typed: dict[str, OptionValue],
    from_file: ParsedFlags | None,
    spellings: Mapping[str, str] = MappingProxyType({}),
) -> tuple[T, dict[str, str]]:
    """Return an instance of an option class, and the source of each value. The command line overrides the file.

    spellings: of `typed`, as in ParsedFlags
    """
    flags = flags_of(options)
    values: dict[str, OptionValue] = {}
    sources = dict.fromkeys(flags, "default")
    command_line = ParsedFlags(typed, dict.fromkeys(typed, "command line"), spellings={**spellings})
    for parsed in ([from_file] if from_file else []) + [command_line]:
        for name, value in parsed.values.items():
            try:
                values[name] = convert(flags[name], value, parsed.sources[name])
            except UsageError as error:
                written = parsed.spellings.get(name)
                raise UsageError(f"{error} It is written as {written}." if written else str(error)) from None
            if parsed.sources[name] != "default" or values[name] != flags[name].default:
                sources[name] = parsed.sources[name]
    resolved = compose(options, **values)
    for name, value in flag_values(resolved).items():
        if value != values.get(name, flags[name].default):  # set by the class
            sources[name] = "derived"
    return resolved, sources
