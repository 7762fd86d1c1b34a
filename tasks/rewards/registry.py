"""Registry of rewards. Plugins register by `@reward("name")` or, as in ms-swift, by `orms["name"] = Class`."""

from typing import Any

from ...templates.json_types import JsonObject
from ..system.plugins import Registrar

# Functions or classes. A class is instantiated once, with the run's options if its constructor takes `args`.
orms: JsonObject = {}
# Registries of ms-swift that plugins may fill: process rewards (of its sampling) and judges of a reward model.
prms: JsonObject = {}
rm_plugins: JsonObject = {}


class ORM:
    """Base class of ms-swift's rewards (outcome reward models): a subclass has a sync or async `__call__`."""

    def __init__(self, args: Any = None, **_: object):
        self.args = args


AsyncORM = ORM


class PRM:
    """Base class of ms-swift's process rewards, which its GRPO does not use either."""

    def __call__(self, **_: object) -> list[Any]:
        raise NotImplementedError(f"{type(self).__name__} needs a method `__call__`")


reward = Registrar(orms, "reward")
