"""A key that is misspelled by one letter is refused, with the true one as the nearest."""

import copy
from pathlib import Path

import pytest
from megaswift.cli.dialects.keys import general, leaves
from megaswift.cli.dialects.run import load_dialect

from tests.cli.dialects.known_configs import (
    OWN,
    row_for,
    rows_of,
    translated,
    tree_of,
    upstream_files,
    with_leaf,
    without_leaf,
)

FILES = OWN | upstream_files()


def misspelled(key: str) -> str:
    """Return a key whose last name has another letter in its middle."""
    start = max(key.rfind("."), key.rfind("]")) + 1
    middle = start + (len(key) - start) // 2
    return key[:middle] + ("q" if key[middle] != "q" else "z") + key[middle + 1 :]


@pytest.mark.parametrize(("path", "name"), FILES.items(), ids=lambda value: getattr(value, "name", value))
def test_each_key_misspelled(path: Path, name: str) -> None:
    tree, *_ = tree_of(path, name)
    rows = rows_of(load_dialect(name))
    wrong = []
    for key, value in leaves(tree):
        other = misspelled(key)
        row = row_for(general(other), rows)
        if row is not None and "*" in row.key:
            continue  # a name that users choose, or a table of which all keys are refused
        assert row is None, f"{other} is a key, too"
        changed = _renamed(tree, key, other, value)
        expected = f"no such key. The nearest is {general(key)}"
        refused = translated(changed, name).refused
        if not any(text.startswith(other) and expected in text for text in refused):
            wrong.append((other, [text for text in refused if text.startswith(other)]))
    assert wrong == []


def _renamed(tree: dict, key: str, other: str, value: object) -> dict:
    if "[" not in key:
        return with_leaf(without_leaf(tree, key), other, value)
    result = without_leaf(tree, key)
    table = copy.deepcopy(result)
    node = table
    *parents, _ = key.replace("[", ".[").split(".")
    for part in parents:
        node = node[int(part[1:-1])] if part.startswith("[") else node[part]
    node[other.rpartition(".")[2]] = value
    return table
