"""Import alias `swift` for plugins written for ms-swift.

While a plugin is loaded or runs, `from swift.rewards import ORM, orms` gives the classes and registries of this project
(ms_swift_names.py). At other times there is no alias. An installed ms-swift is hidden from plugins, since what they
register there would not be found here; all other code keeps it.
"""

import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .ms_swift_names import ABSENT, MODULES


class MsSwiftImportError(ImportError):
    """Import of a name of ms-swift that this project does not have."""


class MsSwiftModule(ModuleType):
    """Module of ms-swift, with the names of the table. They are resolved when they are read."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return list(MODULES[self.__name__])
        if name.startswith("__"):
            raise AttributeError(name)
        submodule = f"{self.__name__}.{name}"
        if submodule in MODULES:
            return importlib.import_module(submodule)
        if name not in MODULES[self.__name__]:
            raise MsSwiftImportError(f"{submodule} does not exist here. {_contents(self.__name__)}")
        target = MODULES[self.__name__][name]
        value = _absent_class(submodule) if target == ABSENT else _resolve(target)
        setattr(self, name, value)
        return value


class MsSwiftFinder(MetaPathFinder, Loader):
    """Finder of the modules of the table. A module keeps its identity, also if the alias was gone in between."""

    def __init__(self) -> None:
        self._modules: dict[str, MsSwiftModule] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_ms_swift(fullname):
            return None
        if fullname not in MODULES:
            parent = fullname.rpartition(".")[0]
            raise MsSwiftImportError(f"{fullname} does not exist here. {_contents(parent)}", name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules.setdefault(spec.name, MsSwiftModule(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are resolved when they are read."""


_finder = MsSwiftFinder()
_lock = threading.RLock()
_users = 0  # calls inside `ms_swift_imports`, of all threads
_installed: dict[str, ModuleType] = {}  # modules of an installed ms-swift, hidden meanwhile


@contextmanager
def ms_swift_imports() -> Iterator[None]:
    """Provide the alias in a `with` block. Blocks may be nested, and run in several threads."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _installed.update(_remove_modules())
            sys.meta_path.insert(0, _finder)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                sys.meta_path.remove(_finder)
                _remove_modules()
                sys.modules.update(_installed)
                _installed.clear()


def _remove_modules() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ms_swift(name)}


def _is_ms_swift(module: str) -> bool:
    return module.partition(".")[0] == "swift"


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"megaswift.tasks.{module}"), name)


def _absent_class(name: str) -> type:
    """Return a class that raises NotImplementedError when it is instantiated."""

    def refuse(self: object, *_: object, **__: object) -> None:
        raise NotImplementedError(f"{name} does not exist here. Rewrite {type(self).__name__} without it")

    return type(name.rpartition(".")[2], (), {"__init__": refuse, "__module__": name.rpartition(".")[0]})


def _contents(module: str) -> str:
    """Return a sentence on what can be imported from a module, else from its nearest parent."""
    while module not in MODULES:
        module = module.rpartition(".")[0]
    submodules = [name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == module]
    names = [name for name, target in MODULES[module].items() if target != ABSENT]
    return f"{module} has {', '.join(sorted({*names, *submodules}, key=str.lower)) or 'nothing'}"
