"""Placement of ROLL's roles on GPUs (`device_mapping`), as training processes with engines in them or beside them."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LARGEST = 100_000  # GPUs; a mapping of more is a typing error
FORMS = "list(range(A,B)), sums of such lists, or a list of numbers"


class MappingError(ValueError):
    """Mapping that cannot be read, or whose parts do not fit together. Its text is a problem and its fix."""


def parse_devices(value: object) -> tuple[int, ...]:
    """Return the GPUs of a `device_mapping`, which may be text. Nothing is evaluated.

    Raises MappingError.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    try:
        tree = ast.parse(value.strip(), mode="eval").body if isinstance(value, str) else None
        devices = [_index(item) for item in value] if isinstance(value, list) else _parse(tree)
    except (SyntaxError, ValueError, RecursionError):
        raise MappingError(f"not a list of GPUs. Write {FORMS}") from None
    if not devices or len(set(devices)) != len(devices) or min(devices) < 0:
        raise MappingError("names no GPU, or one of them twice. Write each once")
    return tuple(devices)


def _index(item: object) -> int:
    if isinstance(item, bool) or not isinstance(item, int):
        raise ValueError
    return item


def _parse(node: ast.AST | None) -> list[int]:
    """Return the numbers of `list(range(a,b))`, `list([a, b])`, `[a, b]`, and sums of these."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _parse(left) + _parse(right)
        case ast.Call(func=ast.Name(id="list"), args=[ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[])]):
            numbers = range(*(_constant(bound) for bound in bounds)) if 1 <= len(bounds) <= 3 else range(0)
            if len(numbers) > LARGEST:
                raise ValueError
            return list(numbers)
        case ast.Call(func=ast.Name(id="list"), args=[ast.List() | ast.Tuple() as items], keywords=[]):
            return _parse(items)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_constant(item) for item in items]
    raise ValueError


def _constant(node: ast.AST) -> int:
    return _index(node.value) if isinstance(node, ast.Constant) else _index(None)


@dataclass(frozen=True)
class RolePlacement:
    """Training processes on one or more nodes, and the engines that generate for them."""

    processes: int
    nodes: int
    mode: Literal["colocate", "server"]
    servers: int = 0  # GPUs of engines apart from training
    is_one_node: bool = True  # the servers are on the node of training
    note: str = ""  # difference from the engines' mapping


def place(training: Sequence[int], engines: Sequence[int] | None, gpus_of_node: int) -> RolePlacement:
    """Return the placement of the GPUs of all trained roles together, and of the engines. None: nothing generates.

    Raises MappingError.
    """
    trained = set(training)
    processes, nodes = len(trained), -(-len(trained) // gpus_of_node)
    if processes % nodes:
        raise MappingError(
            f"{processes} training processes are not equally many on each of {nodes} nodes of {gpus_of_node} GPUs. "
            "Train on whole nodes"
        )
    drawing = set(engines if engines is not None else trained)
    if drawing == trained:
        return RolePlacement(processes, nodes, "colocate")
    if drawing < trained:
        note = f"engines are on all {processes} GPUs of training, with the same numbers"
        return RolePlacement(processes, nodes, "colocate", note=note)
    if drawing & trained:
        apart = sorted(drawing - trained)
        raise MappingError(
            "some of its GPUs train, and some do not. Set it to the GPUs of training, "
            f"{shown(sorted(trained))}, or to others, such as {shown(apart)}"
        )
    is_one_node = nodes == 1 and len({number // gpus_of_node for number in trained | drawing}) == 1
    return RolePlacement(processes, nodes, "server", len(drawing), is_one_node)


def shown(devices: Sequence[int]) -> str:
    """Return GPUs as ROLL writes them."""
    if list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"list(range({devices[0]},{devices[-1] + 1}))"
    return f"list([{','.join(map(str, devices))}])"


def differing_roles(training: Sequence[int], roles: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the roles that are not on all GPUs of training, or beside them. They take turns on all of these."""
    return [name for name, devices in roles.items() if set(devices) != set(training)]
