"""No dead flags: each field of each option class is read by code that does something with it."""

import ast
from pathlib import Path

import pytest
from megaswift.cli.flags import flags_of
from megaswift.cli.main import COMMANDS
from megaswift.tasks import options as option_sets

ROOT = Path(__file__).parents[2]


def names_read() -> set[str]:
    """Names read as `options.name`, or by `for n in ("name", ...): getattr(options, n)`.

    In the rooms, not in the command line's checks: these do nothing with what they read.
    """
    files = [file for room in ("bridge", "templates", "tasks") for file in (ROOT / room).rglob("*.py")]
    files = [file for file in files if file.name != "options.py"] + [ROOT / "cli" / "main.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    for loop in nodes:
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Tuple) and isinstance(loop.target, ast.Name):
            got = [node.args[1] for node in ast.walk(loop) if isinstance(node, ast.Call) and len(node.args) > 1]
            if any(isinstance(name, ast.Name) and name.id == loop.target.id for name in got):
                read |= {item.value for item in loop.iter.elts if isinstance(item, ast.Constant)}
    return read


@pytest.mark.parametrize(
    "name", sorted({c.options for commands in COMMANDS.values() for c in commands.values()} - {""})
)
def test_each_flag_is_read(name: str) -> None:
    assert set(flags_of(getattr(option_sets, name))) - names_read() == set()
