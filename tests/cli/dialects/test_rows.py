"""Every row of every dialect, in a config of our own or added to one."""

from functools import cache
from typing import Any

import pytest
from megaswift.cli.commands import COMMANDS
from megaswift.cli.dialects.keys import general
from megaswift.cli.dialects.run import load_dialect
from megaswift.cli.dialects.table import Row
from megaswift.cli.dialects.translation import Translation
from megaswift.cli.flags import Flag, OptionValue, flags_of

from tests.cli.dialects.known_configs import NAMES, OWN, leaf_keys, row_for, rows_of, translated, tree_of, with_leaf

TRAINING = ("pt", "sft", "rlhf")


def all_flags() -> dict[str, Flag]:
    """Return every flag of the training commands."""
    return {
        name: flag
        for command in TRAINING
        for kind in COMMANDS["megatron"][command].kinds.values()
        for name, flag in flags_of(kind.option_class).items()
    }


def is_of_tree(name: str, row: Row) -> bool:
    """Return whether a row is of a table with verl's rows, which are tested where they are at the root."""
    tree = load_dialect(name).tree
    return bool(tree) and row.key.startswith(f"{tree}.")


FLAGS = all_flags()
# siiRL has verl's rows.
ROWS = [
    pytest.param(name, row, id=f"{name}: {row.key}")
    for name in NAMES
    for row in load_dialect(name).rows
    if name != "siirl" and not is_of_tree(name, row)
]


@cache
def used_rows(name: str) -> list[Row | None]:
    """Return the rows that our own configs of a dialect use."""
    rows = rows_of(load_dialect(name))
    paths = [(path, other) for path, other in OWN.items() if rows_of(load_dialect(other)) == rows]
    return [row_for(general(key), rows) for path, other in paths for key in leaf_keys(tree_of(path, other)[0])]


def sample(row: Row) -> Any:
    """Return a value that a row accepts."""
    if row.accepted:
        return row.accepted[0]
    if row.values:
        return next(iter(row.values))
    flag = FLAGS.get(row.flags[0]) if row.flags else None
    if flag is None:
        return "x"
    samples = {"true|false": True, "int": 1, "int ...": 1, "int|auto": 1, "number": 0.5, "number ...": 0.5}
    if flag.metavar in samples:
        return samples[flag.metavar]
    return flag.metavar.split("|")[0].removesuffix(" ...") if "|" in flag.metavar else "x"


def concrete(key: str) -> str:
    """Return a key that fits a row's pattern."""
    return key.replace("**", "x.y").replace("*", "x")


def with_row(name: str, row: Row, value: OptionValue) -> tuple[Translation, str]:
    """Return the translation of the dialect's first config that has a row's table, with the row's key, and the key."""
    paths = [path for path, dialect in OWN.items() if dialect == name]
    key = concrete(row.key)
    parents = key.split(".")[:-1]
    tables = [".".join(parents[:depth]) for depth in range(len(parents), 0, -1)]
    path = next((path for table in tables for path in paths if table in tables_of(path, name)), paths[0])
    return translated(with_leaf(tree_of(path, name)[0], key, value), name), key.replace("[]", "[0]")


@cache
def tables_of(path: Any, name: str) -> set[str]:
    """Return the tables of a config, as rows write them."""
    keys = [general(leaf).split(".") for leaf in leaf_keys(tree_of(path, name)[0])]
    return {".".join(parts[:depth]) for parts in keys for depth in range(1, len(parts))}


def refusals(translation: Translation, key: str) -> list[str]:
    return [text for text in translation.refused if text.startswith(f"{key} ") or f": {key} asks for" in text]


@pytest.mark.parametrize("name", NAMES)
def test_a_dialect_has_a_config_here(name: str) -> None:
    assert name in OWN.values()


@pytest.mark.parametrize("name", NAMES)
def test_keys_have_one_row(name: str) -> None:
    keys = [row.key for row in load_dialect(name).rows]
    assert [key for key in keys if keys.count(key) > 1] == []


@pytest.mark.parametrize(("path", "name"), OWN.items(), ids=lambda value: getattr(value, "name", value))
def test_own_configs_are_followed(path: Any, name: str) -> None:
    tree, _, problems = tree_of(path, name)
    assert (problems, translated(tree, name).refused) == ([], [])


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_row(name: str, row: Row) -> None:
    assert row.text or row.kind == "flag"
    assert not row.text.endswith(".")
    if row.kind == "computed":
        assert row in used_rows(name), "add a config in configs/ that has it"
        return
    translation, key = with_row(name, row, sample(row))
    if row.kind == "flag":
        assert row.flags[0] in translation.flags or refusals(translation, key), translation.refused
        if not refusals(translation, key):
            assert key in translation.sources[row.flags[0]] or key in translation.needless
    elif row.kind == "noted":
        neutral = key in translation.needless
        translation, key = with_row(name, row, "another value")
        assert neutral == bool(row.accepted)
        assert any(note.startswith(f"{key} ") for note in translation.notes) or refusals(translation, key)
    elif row.kind == "needless":
        assert key in translation.needless
    elif row.kind == "only":
        assert (key in translation.needless) == bool(row.accepted)
        assert refusals(with_row(name, row, "another value")[0], key)
    else:
        assert refusals(with_row(name, row, "another value")[0], key)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one each", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_a_computed_key_ends_in_a_traceback(name: str, every: bool) -> None:
    """Each row has each value in some config; `every`: in each config."""
    values: tuple[OptionValue, ...] = ("x", 0, [None])
    paths = [path for path, dialect in OWN.items() if dialect == name]
    rows = [row for row in load_dialect(name).rows if row.kind == "computed" or "size" in row.key]
    for number, path in enumerate([*paths, *paths[: max(0, len(values) - len(paths))]]):
        tree = tree_of(path, name)[0]
        for row in rows:
            for value in values if every else (values[number % len(values)],):
                translated(with_leaf(tree, concrete(row.key), value), name)


@pytest.mark.parametrize("name", NAMES)
def test_flags_of_rows_exist(name: str) -> None:
    dialect = load_dialect(name)
    names = {flag for row in dialect.rows for flag in row.flags} | set(dialect.defaults)
    assert sorted(names - set(FLAGS)) == []


@pytest.mark.parametrize(("path", "name"), OWN.items(), ids=lambda value: getattr(value, "name", value))
def test_flags_of_configs_are_those_of_the_command(path: Any, name: str) -> None:
    translation = translated(tree_of(path, name)[0], name)
    command = COMMANDS["megatron"][translation.command]
    kind = translation.flags.get(command.by) if command.types else ""
    options = command.kinds[str(kind or next(iter(command.kinds)))].option_class
    assert sorted(set(translation.flags) - set(flags_of(options))) == []
