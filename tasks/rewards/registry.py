"""Rewards by name. A plugin puts its own in, by `@reward("name")` or, as in ms-swift, by `orms["name"] = Class`."""

from collections.abc import Callable
from typing import Any, overload

from ..plugins import registrar

# A function, or a class: then one instance is made, with the run's options where it takes `args`.
orms: dict[str, Any] = {}


class ORM:
    """What ms-swift's rewards are made of (outcome reward models): a subclass has `__call__`, which may be async."""

    def __init__(self, args: Any = None, **_: Any):
        self.args = args


AsyncORM = ORM


@overload
def reward[T: Callable](name: str) -> Callable[[T], T]: ...
@overload
def reward[T: Callable](name: T) -> T: ...
def reward(name: Any) -> Any:
    """Register a function or a class: `@reward("name")`, or `@reward` under its own name.

    Raises ValueError where the name is taken.
    """
    return registrar(orms, name, "reward")
