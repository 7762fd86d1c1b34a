"""No dead flags: each field of each option class is read by code that does something with it."""

import ast
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from megaswift.cli.commands import COMMANDS
from megaswift.cli.flags import flags_of
from megaswift.tasks import options as option_sets
from megaswift.tasks.run.planning import SIZES, RoleName

ROOT = Path(__file__).parents[2]


@cache
def names_read() -> set[str]:
    """Names read as `options.name`, or by `for n in ("name", ...): getattr(options, n)`.

    Or by a comprehension of that shape. In the rooms and in what starts processes, not in the command line's checks:
    these do nothing with what they read.
    """
    files = [file for room in ("bridge", "templates", "tasks") for file in (ROOT / room).rglob("*.py")]
    files = [file for file in files if file.name not in ("options.py", "option_groups.py")]
    files += [ROOT / "cli" / name for name in ("main.py", "rollout_servers.py", "training_launch.py", "tune.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    for node in nodes:
        for loop in getattr(node, "generators", [node]):
            if isinstance(loop, ast.For | ast.comprehension) and isinstance(loop.iter, ast.Tuple):
                got = [each.args[1] for each in ast.walk(node) if isinstance(each, ast.Call) and len(each.args) > 1]
                if any(isinstance(name, ast.Name) and ast.dump(name) == _loaded(loop.target) for name in got):
                    read |= {item.value for item in loop.iter.elts if isinstance(item, ast.Constant)}
    # Composed by `role_layout`.
    read |= {f"{role}_{size}_parallel_size" for role in get_args(RoleName) for size in SIZES}
    return read


def _loaded(target: ast.expr) -> str:
    return ast.dump(ast.Name(target.id, ast.Load())) if isinstance(target, ast.Name) else ""


@pytest.mark.parametrize(
    "name", sorted({k.options for commands in COMMANDS.values() for c in commands.values() for k in c.kinds.values()})
)
def test_each_flag_is_read(name: str) -> None:
    assert set(flags_of(getattr(option_sets, name))) - names_read() == set()
