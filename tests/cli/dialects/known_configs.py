"""Configs of the tests: our own, small ones in configs/, and upstream's in the folder that MEGASWIFT_DIALECTS names.

An own config is named DIALECT-WHAT.yaml, or DIALECT-WHAT.args with a word in each line. The first of a dialect by name
is the one that single keys are added to. DIALECT-tiny.* is run by the tests that check a whole command: it reads
`model` and `train.jsonl` in the working folder, of which `conftest.py` makes tiny ones.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from megaswift.cli.dialects.keys import Keys, Tree, leaves, read_tree
from megaswift.cli.dialects.run import DIALECTS, load_dialect
from megaswift.cli.dialects.run_words import MODULES, RunWords, read_words
from megaswift.cli.dialects.table import Row
from megaswift.cli.dialects.translation import Dialect, Translation, find_row, translate

FOLDER = Path(__file__).parent / "configs"
UPSTREAM = Path(os.environ.get("MEGASWIFT_DIALECTS", "/nowhere"))
needs_upstream = pytest.mark.skipif(not UPSTREAM.is_dir(), reason="MEGASWIFT_DIALECTS names no folder")
PLACEHOLDER = "{your_home_path}"  # in upstream's words, where a user puts a path


def _is_written(name: str) -> bool:
    try:
        load_dialect(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megaswift.cli.dialects"):
            raise
        return False
    return True


NAMES = [name for name in DIALECTS if _is_written(name)]
OWN = {path: path.name.partition("-")[0] for path in sorted(FOLDER.glob("*-*.*"))}  # file -> dialect
OWN = {path: name for path, name in OWN.items() if name in NAMES}


def upstream_files() -> dict[Path, str]:
    """Return upstream's configs with their dialects."""
    if not UPSTREAM.is_dir():
        return {}
    files = {}
    for path in sorted(UPSTREAM.rglob("*.yaml")) + sorted(UPSTREAM.rglob("*.args")):
        system = path.relative_to(UPSTREAM).parts[0]
        name = "verl" if system == "siirl" and path.name.startswith("verl-") else system
        if name in NAMES and path.name != "traj_envs.yaml":  # a part of another file
            files[path] = name
    return files


def words_of(path: Path, name: str) -> list[str]:
    """Return the words of `megatron run` for a config."""
    module = next((module for module, dialect in MODULES.items() if dialect == name), None)
    if path.suffix == ".args":
        return [module or "", *path.read_text().replace(PLACEHOLDER, "/home/user").splitlines()]
    return [module, str(path)] if module else [str(path)]


def tree_of(path: Path, name: str) -> tuple[Tree, RunWords, list[str]]:
    """Return a config's tree and words, and the problems of its values."""
    words = read_words(words_of(path, name))
    tree, problems = read_tree(words.file, words.overrides)
    return tree, words, problems


def translated(tree: Tree, name: str, file: str = "f.yaml") -> Translation:
    return translate(load_dialect(name), Keys(tree, file))


def rows_of(dialect: Dialect) -> dict[str, Row]:
    return {row.key: row for row in dialect.rows}


def row_for(key: str, rows: dict[str, Row]) -> Row | None:
    return find_row(key, rows)


def with_leaf(tree: Tree, key: str, value: Any) -> Tree:
    """Return a copy of a tree with a leaf. `[]` in the key is the first table of a list."""
    result = copy.deepcopy(tree)
    table: Any = result
    *parents, last = key.split(".")
    for part in parents:
        name = part.removesuffix("[]")
        child = table.get(name)
        if part.endswith("[]"):
            if not isinstance(child, list) or not child or not isinstance(child[0], Mapping):
                child = [{}]
            table[name], table = child, child[0]
        else:
            if not isinstance(child, Mapping):
                child = {}
            table[name], table = child, child
    table[last] = value
    return result


def without_leaf(tree: Any, key: str) -> Any:
    """Return a copy of a tree without a leaf, whose key is one of `leaves`."""
    result = copy.deepcopy(tree)
    table: Any = result
    *parents, last = key.replace("[", ".[").split(".")
    for part in parents:
        table = table[int(part[1:-1])] if part.startswith("[") else table[part]
    del table[last]
    return result


def leaf_keys(tree: Tree) -> Iterator[str]:
    for key, _ in leaves(tree):
        yield key
