"""Rewards by name. A plugin puts its own in, by `@reward("name")` or, as in ms-swift, by `orms["name"] = Class`."""

from typing import Any

from ..system.plugins import Registrar

# A function, or a class: then one instance is made, with the run's options where it takes `args`.
orms: dict[str, Any] = {}


class ORM:
    """What ms-swift's rewards are made of (outcome reward models): a subclass has `__call__`, which may be async."""

    def __init__(self, args: Any = None, **_: Any):
        self.args = args


AsyncORM = ORM


reward = Registrar(orms, "reward")
