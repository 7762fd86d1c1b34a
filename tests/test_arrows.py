"""The rooms and the arrows between them: cli -> tasks -> bridge, tasks -> templates, and never back or in a circle."""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "bridge": {"bridge"},
    "templates": {"templates"},
    "tasks": {"tasks", "bridge", "templates"},
    "cli": {"cli", "tasks", "bridge", "templates"},
}
# Packages and files of each room: each may import those before it.
ORDER = {
    "bridge": "imports lazy_compile cudnn_library light_transformers option_groups options pipeline_layout runtime "
    "pinned_memory kernels patches parallel mapping families layers model lora checkpoint",
    "templates": "plural machine cache json_types tokenizer options formats media chat_template dataset batching "
    "prepare",
    "tasks": "options system prepare losses distributed multi_turn turns rewards observability plan run report train "
    "reference convert rollout supervised preference rl distillation infer_metrics infer_media infer_data "
    "infer_engine infer_vllm infer",
    "cli": "flags commands foreign_flags accepted_flags unsupported_flags legacy_flags parse app saved_args checks "
    "flags_doc doctor launch guard rollout_servers supervisor ray_launcher training_launch auto_plan tune torchrun "
    "dialects dialects_doc dry_run main",
}
# Imported by the room's own __init__.py.
FIRST = {"bridge": [f"bridge.{name}" for name in ("imports", "lazy_compile", "cudnn_library", "light_transformers")]}
COMMANDS = {"bridge.families.__main__"}  # run by `python -m`, imported by nothing
FILES = [file for room in MAY_IMPORT for file in sorted((ROOT / room).rglob("*.py"))]


def module(file: Path) -> str:
    """bridge/layers/rope.py -> bridge.layers.rope; a package's __init__.py -> the package"""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(file) for file in FILES}


def imports(file: Path) -> Iterator[str]:
    """The modules of ours that a file imports, anywhere in it."""
    package = module(file).split(".") if file.name == "__init__.py" else module(file).split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("megaswift.")]
            yield from (name.removeprefix("megaswift.") for name in names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            elif (node.module or "").startswith("megaswift"):
                base = (node.module or "").split(".")[1:]
            else:
                continue
            base = [part for part in base if part]
            for alias in node.names:
                name = ".".join([*base, alias.name])
                yield name if name in MODULES else ".".join(base)


@pytest.mark.parametrize("file", FILES, ids=module)
def test_a_room_imports_only_what_is_below_it(file: Path) -> None:
    room = module(file).split(".")[0]
    assert {name.split(".")[0] for name in imports(file)} <= MAY_IMPORT[room]


def test_a_package_imports_only_what_is_before_it() -> None:
    order = {
        room: [*FIRST.get(room, []), room, *(f"{room}.{name}" for name in names.split())]
        for room, names in ORDER.items()
    }
    for file in FILES:
        room, above = module(file).split(".")[0], ".".join(module(file).split(".")[:2])
        assert above in order[room], f"{above} has no place in ORDER"
        if module(file) in COMMANDS:
            continue
        for name in imports(file):
            if name.startswith(f"{room}."):
                below = ".".join(name.split(".")[:2])
                assert order[room].index(below) <= order[room].index(above), f"{module(file)} imports {name}"


def test_no_two_classes_have_the_same_name() -> None:
    trees = {module(file): ast.parse(file.read_text()) for file in FILES}
    names = Counter(node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_files_import_each_other() -> None:
    graph = {module(file): {name for name in imports(file) if name != module(file)} for file in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_are_seen() -> None:
    """The two tests above would pass on a parser that finds nothing."""
    found = {name for file in FILES for name in imports(file)}
    assert {"bridge.options", "tasks.options", "templates.options", "cli.flags"} <= found


def test_a_wheel_has_every_package() -> None:
    """A checkout's own install finds all of them in any case."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({f"megaswift.{'.'.join(file.relative_to(ROOT).parent.parts)}" for file in FILES})
